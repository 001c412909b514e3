// Causal attention over pages of 8-bit keys and values, without gathering them.
//
// A key or value is 64 (head_dim) whole numbers -127 … 127 with a scale of its own. A page has, for each KV head, blocks
// of 16 tokens: keys as [head_dim/4][16 tokens][4] unsigned bytes (128 added), values as [4][head_dim][4 tokens] signed
// ones. A score is an exact whole number times three scales. The largest one is exact in any order; weights are
// 2^(score - largest), which become 16-bit whole numbers of a common scale once the value's own is in them; their sums,
// and those of the products with the values, are exact again. So a token's result depends on its context alone: not on
// its page ids, on the page size, on who else is in the batch, or on the order in which anything is summed.
#pragma once

#include <vector>

#include "vec.h"

namespace lf {

extern "C" struct LfMemory {  // one layer's
    uint8_t* keys;       // [pages, kv_heads, blocks, head_dim/4, 16, 4]
    float* key_scales;   // [pages, kv_heads, blocks · 16]
    int8_t* values;      // [pages, kv_heads, blocks, 4, head_dim, 4]
    float* value_scales;
};

struct Heads {
    int heads, kv_heads, head_dim, page_size, blocks;  // blocks: of 16 tokens, per page
};

// Queries of the step: two signed bytes each, q = 128 · high + low, [tokens, heads, 2, head_dim].
struct Queries {
    std::vector<int8_t> bytes;
    std::vector<int32_t> offset;  // [tokens, heads]: 128 · the sum of q, which the 128 added to keys brings in
    std::vector<float> scale;     // [tokens, heads]: of the score, the softmax's own and log2(e) included
};

// Up to 16 query vectors (tokens · heads per KV head) of one row and KV head.
struct Piece {
    int row, first, count, kv_head;  // `first`: token of the step
    int64_t start;                   // its position
};

struct Scratch {
    std::vector<float> scores;
    std::vector<uint8_t> high, low;
    std::vector<int64_t> slots;  // of each block of context: page · blocks + block
};

#ifdef LEFTFOLD_VNNI
inline __m512i four_bytes(const void* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

inline i16 key_products(const uint8_t* keys, const int8_t* query, int head_dim) {
    __m512i high = _mm512_setzero_si512(), low = high;
    for (int d = 0; d < head_dim; d += 4) {
        const __m512i k = _mm512_loadu_si512(keys + d * 16);
        high = _mm512_dpbusd_epi32(high, k, four_bytes(query + d));
        low = _mm512_dpbusd_epi32(low, k, four_bytes(query + head_dim + d));
    }
    return i16(_mm512_slli_epi32(high, 7)) + i16(low);
}

// Weighted values of N queries over a context, 16 · D elements of each from `at` on.
template <int N, int D>
inline void value_products(
    const int8_t* values, const std::vector<int64_t>& slots, size_t stride, const uint8_t* high, const uint8_t* low,
    size_t width, int head_dim, int at, f16 (*out)[16]) {
    __m512i h[N][D], l[N][D];
    for (int n = 0; n < N; n++)
        for (int d = 0; d < D; d++) h[n][d] = l[n][d] = _mm512_setzero_si512();
    for (size_t b = 0; b < slots.size(); b++) {
        const int8_t* v = values + size_t(slots[b]) * stride + at * 4;
        for (int quad = 0; quad < 4; quad++, v += head_dim * 4) {
            __m512i vector[D];
            for (int d = 0; d < D; d++) vector[d] = _mm512_loadu_si512(v + d * 64);
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) {
                const size_t place = n * width + b * 16 + quad * 4;
                const __m512i wh = four_bytes(high + place), wl = four_bytes(low + place);
#pragma GCC unroll 4
                for (int d = 0; d < D; d++) {
                    h[n][d] = _mm512_dpbusd_epi32(h[n][d], wh, vector[d]);
                    l[n][d] = _mm512_dpbusd_epi32(l[n][d], wl, vector[d]);
                }
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int d = 0; d < D; d++) out[n][(at >> 4) + d] = to_float(i16(h[n][d])) * splat(256.0f) + to_float(i16(l[n][d]));
}
#else
inline i16 key_products(const uint8_t* keys, const int8_t* query, int head_dim) {
    int32_t out[16] = {};
    for (int d = 0; d < head_dim; d += 4)
        for (int t = 0; t < 16; t++)
            for (int i = 0; i < 4; i++)
                out[t] += keys[d * 16 + t * 4 + i] * (128 * query[d + i] + query[head_dim + d + i]);
    return load<i16>(out);
}

template <int N, int D>
inline void value_products(
    const int8_t* values, const std::vector<int64_t>& slots, size_t stride, const uint8_t* high, const uint8_t* low,
    size_t width, int head_dim, int at, f16 (*out)[16]) {
    for (int n = 0; n < N; n++) {
        int32_t h[16 * D] = {}, l[16 * D] = {};
        for (size_t b = 0; b < slots.size(); b++) {
            const int8_t* v = values + size_t(slots[b]) * stride + at * 4;
            for (int quad = 0; quad < 4; quad++, v += head_dim * 4) {
                const size_t place = n * width + b * 16 + quad * 4;
                for (int d = 0; d < 16 * D; d++)
                    for (int i = 0; i < 4; i++) {
                        h[d] += high[place + i] * v[d * 4 + i];
                        l[d] += low[place + i] * v[d * 4 + i];
                    }
            }
        }
        for (int d = 0; d < D; d++)
            out[n][(at >> 4) + d] = to_float(load<i16>(h + 16 * d)) * splat(256.0f) + to_float(load<i16>(l + 16 * d));
    }
}
#endif

template <int N>
inline void all_value_products(
    const int8_t* values, const std::vector<int64_t>& slots, size_t stride, const uint8_t* high, const uint8_t* low,
    size_t width, int head_dim, f16 (*out)[16]) {
    int at = 0;
    for (; head_dim - at >= 64; at += 64) value_products<N, 4>(values, slots, stride, high, low, width, head_dim, at, out);
    for (; head_dim - at >= 32; at += 32) value_products<N, 2>(values, slots, stride, high, low, width, head_dim, at, out);
    for (; head_dim - at >= 16; at += 16) value_products<N, 1>(values, slots, stride, high, low, width, head_dim, at, out);
}

// `pages`: of the piece's row; `window`: how far back a token sees, 0 for all; `out` [tokens, heads, head_dim].
inline void attend(
    const Piece& p, const Heads& h, const LfMemory& memory, const Queries& queries, const int64_t* pages, int64_t window,
    Scratch& scratch, float* out) {
    const int shared = h.heads / h.kv_heads, vectors = p.count * shared;
    const int64_t end = p.start + p.count, from = window && p.start >= window ? p.start - window + 1 : 0;
    std::vector<int64_t>& slots = scratch.slots;
    slots.clear();
    std::vector<float>& scores = scratch.scores;
    const int64_t first_page = from / h.page_size;
    for (int64_t page = first_page; page * h.page_size < end; page++)
        for (int b = 0; b < h.blocks && page * h.page_size + b * 16 < end; b++)
            slots.push_back((pages[page] * h.kv_heads + p.kv_head) * h.blocks + b);
    const size_t width = slots.size() * 16;
    if (scores.size() < width * 16) {
        scores.resize(width * 16);
        scratch.high.resize(width * 16);
        scratch.low.resize(width * 16);
    }
    const size_t stride = size_t(h.head_dim) * 16;
    const i16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float factor[16];
    for (int v = 0; v < vectors; v++) {
        const int token = p.first + v / shared, head = p.kv_head * shared + v % shared;
        const int8_t* query = queries.bytes.data() + (size_t(token) * h.heads + head) * 2 * h.head_dim;
        const i16 offset = splat(queries.offset[size_t(token) * h.heads + head]);
        const f16 scale = splat(queries.scale[size_t(token) * h.heads + head]);
        const int64_t at = p.start + v / shared, since = window && at >= window ? at - window + 1 : 0;
        float* own = scores.data() + v * width;
        f16 most = splat(-INFINITY);
        int64_t page = first_page, block = 0;
        for (size_t b = 0; b < slots.size(); b++) {
            const int64_t base = page * h.page_size + block * 16;
            const int64_t held = h.page_size - block * 16 < 16 ? h.page_size - block * 16 : 16;
            if (++block == h.blocks) block = 0, page++;
            // Lanes `low` … `high` - 1 are positions that the token sees.
            const int64_t low = since - base, high = at + 1 - base < held ? at + 1 - base : held;
            f16 s = splat(-INFINITY);
            if (high > 0 && low < 16) {
                const i16 dots = key_products(memory.keys + size_t(slots[b]) * stride, query, h.head_dim) - offset;
                s = (to_float(dots) * load<f16>(memory.key_scales + slots[b] * 16)) * scale;
                if (high < 16 || low > 0) {
                    const i16 seen = (lanes >= splat(int32_t(low < 0 ? 0 : low))) & (lanes < splat(int32_t(high)));
                    s = seen ? s : splat(-INFINITY);
                }
            }
            most = max(s, most);
            store(own + b * 16, s);
        }
        const f16 top = splat(largest(most));
        i16 mass = splat(0);
        int64_t total = 0;
        f16 heaviest = splat(0.0f);
        for (size_t b = 0; b < slots.size(); b++) {
            const f16 y = load<f16>(own + b * 16) - top;
            const i16 counts = y >= splat(-125.0f);
            const f16 weight = bits_to_float(float_to_bits(exp2(counts ? y : splat(-125.0f))) & counts);
            mass = mass + to_int(nearest(weight * splat(1048576.0f)));
            const f16 scaled = weight * load<f16>(memory.value_scales + slots[b] * 16);
            heaviest = max(scaled, heaviest);
            store(own + b * 16, scaled);
            if ((b & 1023) == 1023 || b + 1 == slots.size()) {
                for (int i = 0; i < 16; i++) total += mass[i];
                mass = splat(0);
            }
        }
        const float heavy = largest(heaviest), inverse = heavy > 0.0f ? 65535.0f / heavy : 0.0f;
        const bool usable = inverse > 0.0f && inverse < 3.0e38f;
        factor[v] = usable ? (heavy / 65535.0f) / (float(total) * (1.0f / 1048576.0f)) : 0.0f;
        for (size_t b = 0; b < slots.size(); b++) {
            const i16 u = usable ? to_int(nearest(load<f16>(own + b * 16) * inverse)) : splat(0);
            store(scratch.high.data() + v * width + b * 16, __builtin_convertvector(u >> 8, u16));
            store(scratch.low.data() + v * width + b * 16, __builtin_convertvector(u & splat(255), u16));
        }
    }
    for (int v = 0; v < vectors;) {
        f16 sums[3][16];
        const uint8_t *high = scratch.high.data() + v * width, *low = scratch.low.data() + v * width;
        const int n = vectors - v < 3 ? vectors - v : 3;
        if (n == 3) all_value_products<3>(memory.values, slots, stride, high, low, width, h.head_dim, sums);
        if (n == 2) all_value_products<2>(memory.values, slots, stride, high, low, width, h.head_dim, sums);
        if (n == 1) all_value_products<1>(memory.values, slots, stride, high, low, width, h.head_dim, sums);
        for (int i = 0; i < n; i++, v++) {
            const int token = p.first + v / shared, head = p.kv_head * shared + v % shared;
            float* to = out + (size_t(token) * h.heads + head) * h.head_dim;
            for (int d = 0; d < h.head_dim; d += 16) store(to + d, sums[i][d >> 4] * factor[v]);
        }
    }
}

}  // namespace lf
