// Weights in 4 bits, which become the 8-bit ones of linear.h before they are multiplied.
//
// Sixteen outputs × 32 inputs are a group of 320 bytes. A weight is ((256 · n + c) · m >> 16) + b, where n is its four
// bits; m (16 bits), c (unsigned byte) and b (signed byte) are of its output in this group. So it is a step of m / 256
// from b on, c being the fraction that rounds. (c · m >> 8 is below 256, and the weight in -127 … 127: the packer's word.)
// Bytes 0 to 255: [4][16 outputs][2][2 bytes]; of word [i][output][h] bits 0 to 3 are n of the group's input 8 i + 2 h + 1,
// 4 to 7 of input 8 i + 2 h + 5, 8 to 11 of 8 i + 2 h, 12 to 15 of 8 i + 2 h + 4. Then m of each output; then c and b.
#pragma once

#include "vec.h"

namespace lf {

const int GROUP = 32, GROUP_BYTES = 320;

#ifdef LEFTFOLD_VNNI
inline __m512i words(uint16_t x) { return _mm512_set1_epi16(short(x)); }

// What a group's outputs have of their own, in both words of each.
struct Steps {
    __m512i m, c, sum, b;  // sum: 256 · b + (c · m >> 8)

    explicit Steps(const uint8_t* group) {
        const i16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512i own = _mm512_load_si512(group + 256), twice = __m512i(lanes * 0x00010001);
        m = _mm512_permutexvar_epi16(twice, own);
        const __m512i cb = _mm512_permutexvar_epi16(_mm512_add_epi16(twice, words(16)), own);
        c = _mm512_and_si512(cb, words(0xff));
        b = _mm512_srli_epi16(cb, 8);
        const __m512i fraction = _mm512_mulhi_epu16(_mm512_slli_epi16(cb, 8), m);
        sum = _mm512_ternarylogic_epi32(cb, words(0xff00), fraction, 0xea);  // (cb & 0xff00) | fraction
    }

    // Four inputs of each output, from bits 0 to 3 and 8 to 11 of each word: the product's high half is the weight of
    // the latter; of the former it is the high byte of the low half.
    __m512i operator()(__m512i v) const {
        const __m512i even = _mm512_mulhi_epu16(_mm512_ternarylogic_epi32(v, words(0x0f00), c, 0xea), m);
        const __m512i odd = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_and_si512(v, words(0x000f)), m), sum);
        return _mm512_mask_add_epi8(odd, 0x5555555555555555ull, even, b);
    }
};

// `take(i, weights)`: of a group, inputs 4 i to 4 i + 3 of sixteen outputs; i = 0 … 7.
template <class Take>
inline void weights_of(const uint8_t* group, Take&& take) {
    const Steps steps(group);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i v = _mm512_load_si512(group + 64 * i);
        take(2 * i, steps(v));
        take(2 * i + 1, steps(_mm512_srli_epi16(v, 4)));
    }
}

// A group's weights as half of a tile.
inline void widen(const uint8_t* group, int8_t* to) {
    weights_of(group, [&](int i, __m512i w) { _mm512_store_si512(to + 64 * i, w); });
}

// One row's bytes (high, low) with two blocks of outputs, whose weights are used as they come.
inline void nibble_products(const uint8_t* x, const uint8_t* groups, int depth, int32_t (*out)[16][16]) {
    for (int block = 0; block < 2; block++) {
        __m512i a[2][2];
        for (auto& byte : a) byte[0] = byte[1] = _mm512_setzero_si512();
        for (int k = 0; k < depth; k += GROUP, groups += GROUP_BYTES) {
            for (int line = 0; line < GROUP_BYTES; line += 64) __builtin_prefetch(groups + 4096 + line);
            weights_of(groups, [&](int i, __m512i w) {
                for (int byte = 0; byte < 2; byte++)
                    a[byte][i & 1] = _mm512_dpbusd_epi32(a[byte][i & 1], four_bytes(x + byte * depth + k + 4 * i), w);
            });
        }
        for (int byte = 0; byte < 2; byte++)
            _mm512_store_si512(out[block][byte], _mm512_add_epi32(a[byte][0], a[byte][1]));
    }
}
#else
inline void widen(const uint8_t* group, int8_t* to) {
    for (int output = 0; output < 16; output++) {
        const int m = load<uint16_t>(group + 256 + 2 * output), c = group[288 + 2 * output];
        const int8_t b = int8_t(group[289 + 2 * output]);
        for (int i = 0; i < 16; i++) {  // two inputs of every fourth
            const int pair = i / 4 * 64 + output * 4 + i % 4, even = 1 - i % 2;
            const uint8_t two = group[pair];
            int8_t* at = to + i / 4 * 128 + output * 4 + (i % 4 & 2) + even;
            at[0] = int8_t(((256 * (two & 15) + c) * m >> 16) + b);
            at[64] = int8_t(((256 * (two >> 4) + c) * m >> 16) + b);
        }
    }
}
#endif

// Of two blocks of outputs, 64 inputs from `k` on as tiles, at their place in a unit of tiles.
inline void widen(const uint8_t* groups, int depth, int k, int8_t* unit) {
    for (int block = 0; block < 2; block++)
        for (int half = 0; half < 2; half++) {
            const int at = k + half * GROUP;
            const uint8_t* group = groups + size_t(block * depth + at) / GROUP * GROUP_BYTES;
            for (int line = 0; line < GROUP_BYTES; line += 64) __builtin_prefetch(group + 4096 + line);
            widen(group, unit + (block * depth + at) * 16);
        }
}

}  // namespace lf
