// Whole-number matrix products: activations [rows, inputs] of -32767 … 32767, weights [outputs, inputs] of -127 … 127.
//
// An activation is two unsigned bytes, (q + 32768) = 256 · high + low, in two rows of bytes: 2r the high, 2r + 1 the low
// ones of row r. Each is multiplied with the weights in exact 32-bit sums, so how these are grouped cannot show: the
// tile unit, vector dot products and plain loops below give the same bits for a row, whatever other rows there are.
// `offset` (128 · the sum of an output's weights) takes the 32768 out again.
//
// Weights lie in tiles of 16 outputs × 64 inputs, [outputs/16][inputs/64][16][16][4]: a tile is 1 KiB, and what the
// tile unit wants; four inputs of 16 outputs are one vector of the dot product.
#pragma once

#include "vec.h"

#ifdef LEFTFOLD_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lf {

extern "C" struct LfLinear {
    const int8_t* weight;
    const float* scale;     // [blocks · 16]
    const int32_t* offset;  // [blocks · 16]
    const float* bias;      // [blocks · 16] or null
    int32_t outputs, inputs, blocks, depth;  // blocks: of 16 outputs, even; depth: inputs rounded up to 64
};

const int AHEAD = 4096;  // bytes
const int ROWS = 32;  // rows of bytes of a block of work: two tiles

#ifdef LEFTFOLD_AMX
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    TileConfig() {
        for (int i = 0; i < 8; i++) bytes[i] = 64, rows[i] = 16;
    }
};

inline bool tiles_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
    return allowed;
}

inline void tiles_on() {
    static const TileConfig config;
    asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void tiles_off() { _tile_release(); }

// Weights of a kilobyte from `w` on, on their way to the cache.
inline void fetch_tile(const int8_t* w) {
    for (int line = 0; line < 1024; line += 64) _mm_prefetch(reinterpret_cast<const char*>(w + line), _MM_HINT_T0);
}

// Sums of two blocks of outputs for up to 32 rows: acc[tile of rows][block][row][16]. `ahead`: bytes of weights to ask
// for before they are needed, 0 where they are in a cache already.
inline void tile_products(
    const uint8_t* x, int rows, const int8_t* w, int depth, int32_t (*acc)[2][16][16], int ahead) {
    const int8_t* w1 = w + size_t(depth) * 16;
    const uint8_t* x1 = x + size_t(depth) * 16;
    _tile_zero(0);
    _tile_zero(1);
    if (rows > 16) {
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < depth; k += 64) {
            if (ahead) fetch_tile(w + k * 16 + ahead), fetch_tile(w1 + k * 16 + ahead);
            _tile_loadd(6, w + k * 16, 64);
            _tile_loadd(4, x + k, depth);
            _tile_loadd(7, w1 + k * 16, 64);
            _tile_loadd(5, x1 + k, depth);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(2, acc[1][0], 64);
        _tile_stored(3, acc[1][1], 64);
    } else {
        for (int k = 0; k < depth; k += 64) {
            if (ahead) fetch_tile(w + k * 16 + ahead), fetch_tile(w1 + k * 16 + ahead);
            _tile_loadd(6, w + k * 16, 64);
            _tile_loadd(4, x + k, depth);
            _tile_loadd(7, w1 + k * 16, 64);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
        }
    }
    _tile_stored(0, acc[0][0], 64);
    _tile_stored(1, acc[0][1], 64);
    asm volatile("" ::: "memory");
}
#else
inline bool tiles_allowed() { return false; }
inline void tiles_on() {}
inline void tiles_off() {}
inline void tile_products(const uint8_t*, int, const int8_t*, int, int32_t (*)[2][16][16], int) {}
#endif

#ifdef LEFTFOLD_VNNI
inline __m512i four(const uint8_t* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

// R rows (at most 12) with two blocks of outputs; S independent sums, for few rows.
template <int R, int S>
inline void dot_products(const uint8_t* x, const int8_t* w, int depth, int32_t (*acc)[2][16][16]) {
    __m512i a[S][R][2];
    for (auto& s : a)
        for (auto& r : s) r[0] = r[1] = _mm512_setzero_si512();
    const int8_t* w1 = w + size_t(depth) * 16;
    for (int k = 0; k < depth; k += 4 * S)
#pragma GCC unroll 4
        for (int s = 0; s < S; s++) {
            const __m512i b0 = _mm512_loadu_si512(w + (k + 4 * s) * 16), b1 = _mm512_loadu_si512(w1 + (k + 4 * s) * 16);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const __m512i v = four(x + size_t(r) * depth + k + 4 * s);
                a[s][r][0] = _mm512_dpbusd_epi32(a[s][r][0], v, b0);
                a[s][r][1] = _mm512_dpbusd_epi32(a[s][r][1], v, b1);
            }
        }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < 2; b++) {
            __m512i total = a[0][r][b];
            for (int s = 1; s < S; s++) total = _mm512_add_epi32(total, a[s][r][b]);
            _mm512_store_si512(acc[r >> 4][b][r & 15], total);
        }
}

inline void vector_products(const uint8_t* x, int rows, const int8_t* w, int depth, int32_t (*acc)[2][16][16]) {
    int r = 0;
    alignas(64) int32_t part[1][2][16][16];
    auto move = [&](int count) {
        for (int i = 0; i < count; i++)
            for (int b = 0; b < 2; b++) std::memcpy(acc[(r + i) >> 4][b][(r + i) & 15], part[0][b][i], 64);
        r += count;
    };
    while (rows - r >= 12) dot_products<12, 1>(x + size_t(r) * depth, w, depth, part), move(12);
    while (rows - r >= 8) dot_products<8, 1>(x + size_t(r) * depth, w, depth, part), move(8);
    while (rows - r >= 4) dot_products<4, 2>(x + size_t(r) * depth, w, depth, part), move(4);
    while (rows - r >= 2) dot_products<2, 4>(x + size_t(r) * depth, w, depth, part), move(2);
}
#else
inline void vector_products(const uint8_t* x, int rows, const int8_t* w, int depth, int32_t (*acc)[2][16][16]) {
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < 2; b++) {
            int32_t a[16] = {};
            for (int k = 0; k < depth; k += 4)
                for (int n = 0; n < 16; n++) {
                    const int8_t* four = w + (size_t(b) * depth + k) * 16 + n * 4;
                    const uint8_t* v = x + size_t(r) * depth + k;
                    a[n] += v[0] * four[0] + v[1] * four[1] + v[2] * four[2] + v[3] * four[3];
                }
            std::memcpy(acc[r >> 4][b][r & 15], a, 64);
        }
}
#endif

// Sixteen-bit activations of one row, its bytes at `high` and `low` (`depth` each); n a multiple of 16. Returns the
// scale: not a number where a value was not finite, so that this shows in every output.
inline float quantize_row(const float* x, int n, uint8_t* high, uint8_t* low) {
    const Scale s = quantize(x, n, 32767.0f, [&](int k, i16 q) {
        const i16 u = q + splat(32768);
        store(high + k, __builtin_convertvector(u >> 8, u16));
        store(low + k, __builtin_convertvector(u & splat(255), u16));
    });
    return s.finite ? s.scale : NAN;
}

// One unit of work: outputs of the blocks 2 · unit and 2 · unit + 1 for `rows` rows of activations x [2 · rows, depth]
// (readable up to a multiple of 16 rows of bytes) with a scale each. `sink(row, first, second)` takes sixteen outputs
// of both blocks.
template <class Sink>
inline void linear_unit(const LfLinear& l, int unit, const uint8_t* x, const float* x_scale, int rows, Sink&& sink) {
    alignas(64) int32_t acc[2][2][16][16];
    const int8_t* w = l.weight + size_t(unit) * 32 * l.depth;
    const int first = unit * 32;
    const bool tiles = tiles_allowed();
    const f16 scale[2] = {load<f16>(l.scale + first), load<f16>(l.scale + first + 16)};
    const i16 offset[2] = {load<i16>(l.offset + first), load<i16>(l.offset + first + 16)};
    for (int low = 0; low < 2 * rows; low += ROWS) {
        const int count = 2 * rows - low < ROWS ? 2 * rows - low : ROWS;
        if (tiles) tile_products(x + size_t(low) * l.depth, count, w, l.depth, acc, low ? 0 : AHEAD);
        else vector_products(x + size_t(low) * l.depth, count, w, l.depth, acc);
        for (int r = 0; r < count; r += 2) {
            const int row = (low + r) >> 1;
            f16 out[2];
            for (int b = 0; b < 2; b++) {
                const f16 high = to_float(load<i16>(acc[r >> 4][b][r & 15]) - offset[b]);
                const f16 total = high * splat(256.0f) + to_float(load<i16>(acc[r >> 4][b][(r & 15) + 1]));
                out[b] = total * (x_scale[row] * scale[b]);
                if (l.bias) out[b] = out[b] + load<f16>(l.bias + first + 16 * b);
            }
            sink(row, out[0], out[1]);
        }
    }
}

}  // namespace lf
