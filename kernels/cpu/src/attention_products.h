// Products of up to 16 query vectors with keys, and of their softmax weights with values: the tile unit, vector dot
// products and plain loops give the same exact sums.
#pragma once

#include "buffer.h"
#include "tiles.h"

namespace lf {

// Softmax weights, 256 · high + low, of some vectors: [vectors, width] each.
struct Weights {
    const uint8_t *high, *low;
    size_t width;
    int vectors;
};

inline f16 joined(const int32_t* high, const int32_t* low) {
    return joined(to_float(load<i16>(high)), to_float(load<i16>(low)));
}

#ifdef LEFTFOLD_AMX
inline void attention_tiles(int vectors) {
    if (tiles_allowed()) tiles_set(TileConfig(vectors));
}

// By the tile unit: of 16 vectors with 16 keys at once.
inline void key_tiles(const int8_t* query, int head_dim, const uint8_t* keys, bool loaded, int32_t (*out)[16][16]) {
    in_order();
    _tile_zero(0);
    _tile_zero(1);
    for (int d = 0; d < head_dim; d += 64) {
        if (!loaded) {
            _tile_loadd(2, query + d, 2 * head_dim);
            _tile_loadd(3, query + head_dim + d, 2 * head_dim);
        }
        _tile_loadd(4, keys + d * 16, 64);
        _tile_dpbsud(0, 2, 4);
        _tile_dpbsud(1, 3, 4);
    }
    _tile_stored(0, out[0], 64);
    _tile_stored(1, out[1], 64);
    in_order();
}

template <class Sink>
inline void value_tiles(const int8_t* values, const Buffer<int64_t>& slots, const Weights& w, int head_dim, Sink&& sink) {
    alignas(64) int32_t sums[4][16][16];
    const size_t stride = size_t(head_dim) * 16, row = size_t(head_dim) * 4;
    in_order();
    for (int d = 0; d < head_dim; d += 32) {
        const bool both = d + 32 <= head_dim;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t b = 0; b < slots.size(); b++) {
            const int8_t* v = values + size_t(slots[b]) * stride + d * 4;
            _tile_loadd(5, w.high + b * 16, w.width);
            _tile_loadd(6, w.low + b * 16, w.width);
            _tile_loadd(7, v, row);
            _tile_dpbusd(0, 5, 7);
            _tile_dpbusd(1, 6, 7);
            if (both) {
                _tile_loadd(7, v + 64, row);
                _tile_dpbusd(2, 5, 7);
                _tile_dpbusd(3, 6, 7);
            }
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        in_order();
        for (int n = 0; n < w.vectors; n++) {
            sink(n, d, joined(sums[0][n], sums[1][n]));
            if (both) sink(n, d + 16, joined(sums[2][n], sums[3][n]));
        }
    }
}
#else
inline void attention_tiles(int) {}
inline void key_tiles(const int8_t*, int, const uint8_t*, bool, int32_t (*)[16][16]) {}
template <class Sink>
inline void value_tiles(const int8_t*, const Buffer<int64_t>&, const Weights&, int, Sink&&) {}
#endif

#ifdef LEFTFOLD_VNNI
inline void key_dots(const int8_t* query, int head_dim, const uint8_t* keys, int32_t* high_out, int32_t* low_out) {
    __m512i high = _mm512_setzero_si512(), low = high;
    for (int d = 0; d < head_dim; d += 4) {
        const __m512i k = _mm512_loadu_si512(keys + d * 16);
        high = _mm512_dpbusd_epi32(high, k, four_bytes(query + d));
        low = _mm512_dpbusd_epi32(low, k, four_bytes(query + head_dim + d));
    }
    _mm512_storeu_si512(high_out, high);
    _mm512_storeu_si512(low_out, low);
}

// Weighted values of N vectors from the `first` on, 16 · D elements of each from `at` on.
template <int N, int D, class Sink>
inline void value_dots(
    const int8_t* values, const Buffer<int64_t>& slots, const Weights& w, int head_dim, int first, int at, Sink&& sink) {
    __m512i h[N][D], l[N][D];
    for (int n = 0; n < N; n++)
        for (int d = 0; d < D; d++) h[n][d] = l[n][d] = _mm512_setzero_si512();
    for (size_t b = 0; b < slots.size(); b++) {
        const int8_t* v = values + size_t(slots[b]) * head_dim * 16 + at * 4;
        for (int quad = 0; quad < 4; quad++, v += head_dim * 4) {
            __m512i vector[D];
            for (int d = 0; d < D; d++) vector[d] = _mm512_loadu_si512(v + d * 64);
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) {
                const size_t place = (first + n) * w.width + b * 16 + quad * 4;
                const __m512i wh = four_bytes(w.high + place), wl = four_bytes(w.low + place);
#pragma GCC unroll 4
                for (int d = 0; d < D; d++) {
                    h[n][d] = _mm512_dpbusd_epi32(h[n][d], wh, vector[d]);
                    l[n][d] = _mm512_dpbusd_epi32(l[n][d], wl, vector[d]);
                }
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int d = 0; d < D; d++)
            sink(first + n, at + 16 * d, joined(to_float(i16(h[n][d])), to_float(i16(l[n][d]))));
}
#else
inline void key_dots(const int8_t* query, int head_dim, const uint8_t* keys, int32_t* high_out, int32_t* low_out) {
    int32_t high[16] = {}, low[16] = {};
    for (int d = 0; d < head_dim; d += 4)
        for (int t = 0; t < 16; t++)
            for (int i = 0; i < 4; i++) {
                high[t] += keys[d * 16 + t * 4 + i] * query[d + i];
                low[t] += keys[d * 16 + t * 4 + i] * query[head_dim + d + i];
            }
    std::memcpy(high_out, high, 64);
    std::memcpy(low_out, low, 64);
}

template <int N, int D, class Sink>
inline void value_dots(
    const int8_t* values, const Buffer<int64_t>& slots, const Weights& w, int head_dim, int first, int at, Sink&& sink) {
    for (int n = first; n < first + N; n++) {
        int32_t h[16 * D] = {}, l[16 * D] = {};
        for (size_t b = 0; b < slots.size(); b++) {
            const int8_t* v = values + size_t(slots[b]) * head_dim * 16 + at * 4;
            for (int quad = 0; quad < 4; quad++, v += head_dim * 4) {
                const size_t place = n * w.width + b * 16 + quad * 4;
                for (int d = 0; d < 16 * D; d++)
                    for (int i = 0; i < 4; i++) {
                        h[d] += w.high[place + i] * v[d * 4 + i];
                        l[d] += w.low[place + i] * v[d * 4 + i];
                    }
            }
        }
        for (int d = 0; d < D; d++) sink(n, at + 16 * d, joined(h + 16 * d, l + 16 * d));
    }
}
#endif

// Of some queries [vectors, 2, head_dim] with blocks of 16 keys: `out[0]` of the high, `out[1]` of the low bytes.
class KeyProducts {
  public:
    KeyProducts(const int8_t* query, int vectors, int head_dim) : query_(query), vectors_(vectors), head_dim_(head_dim) {
#ifdef LEFTFOLD_AMX
        if (loaded_) {
            _tile_loadd(2, query, 2 * head_dim);
            _tile_loadd(3, query + head_dim, 2 * head_dim);
        }
#endif
    }

    void operator()(const uint8_t* keys, int32_t (*out)[16][16]) const {
        if (tiles_) return key_tiles(query_, head_dim_, keys, loaded_, out);
        for (int v = 0; v < vectors_; v++) {
            const int8_t* query = query_ + size_t(v) * 2 * head_dim_;
            key_dots(query, head_dim_, keys, out[0][v], out[1][v]);
        }
    }

  private:
    const int8_t* query_;
    const int vectors_, head_dim_;
    const bool tiles_ = tiles_allowed() && head_dim_ % 64 == 0, loaded_ = tiles_ && head_dim_ == 64;
};

template <int N, class Sink>
inline void value_rows(
    const int8_t* values, const Buffer<int64_t>& slots, const Weights& w, int head_dim, int first, Sink&& sink) {
    int at = 0;
    for (; head_dim - at >= 64; at += 64) value_dots<N, 4>(values, slots, w, head_dim, first, at, sink);
    for (; head_dim - at >= 32; at += 32) value_dots<N, 2>(values, slots, w, head_dim, first, at, sink);
    for (; head_dim - at >= 16; at += 16) value_dots<N, 1>(values, slots, w, head_dim, first, at, sink);
}

// Of weights with the values in `slots`; `sink(vector, d, sums)` takes sixteen elements from d on.
template <class Sink>
inline void value_products(
    const int8_t* values, const Buffer<int64_t>& slots, const Weights& w, int head_dim, Sink&& sink) {
    if (tiles_allowed()) return value_tiles(values, slots, w, head_dim, sink);
    int first = 0;
    for (; w.vectors - first >= 3; first += 3) value_rows<3>(values, slots, w, head_dim, first, sink);
    for (; w.vectors - first >= 2; first += 2) value_rows<2>(values, slots, w, head_dim, first, sink);
    for (; w.vectors - first >= 1; first += 1) value_rows<1>(values, slots, w, head_dim, first, sink);
}

}  // namespace lf
