// Whole-number matrix products: activations [rows, inputs] of -32767 … 32767, weights [outputs, inputs] of -127 … 127.
//
// An activation is two unsigned bytes, (q + 32768) = 256 · high + low, in two rows of bytes: 2r the high, 2r + 1 the low
// ones of row r. Each is multiplied with the weights in exact 32-bit sums, so how these are grouped cannot show: the
// tile unit, vector dot products and plain loops below give the same bits for a row, whatever other rows there are.
// `offset` (128 · the sum of an output's weights) takes the 32768 out again.
//
// Weights lie in tiles of 16 outputs × 64 inputs, [outputs/16][inputs/64][16][16][4]: a tile is 1 KiB, and what the
// tile unit wants; four inputs of 16 outputs are one vector of the dot product. Weights in 4 bits (nibbles.h) become such
// tiles while those before them are multiplied, or are used as they come where there is one row.
#pragma once

#include "buffer.h"
#include "nibbles.h"
#include "tiles.h"

namespace lf {

extern "C" struct LfLinear {
    const void* weight;     // int8_t, or groups of 4 bits
    const float* scale;     // [blocks · 16]
    const int32_t* offset;  // [blocks · 16]
    const float* bias;      // [blocks · 16] or null
    int32_t outputs, inputs, blocks, depth;  // blocks: of 16 outputs, even; depth: inputs rounded up to 64
    int32_t bits;                            // of a weight: 8 or 4

    // Of a unit, two blocks of outputs: as tiles, and as they lie in memory.
    size_t size() const { return size_t(depth) * 32; }
    size_t stored() const { return bits == 8 ? size() : size_t(depth) * 20; }
};

const int AHEAD = 4096;  // bytes
const int ROWS = 32;  // rows of bytes of a block of work: two tiles
const int SUMS = 2 * 2 * 16 * 16;  // of a block of rows with two blocks of outputs
const int MANY = 4;  // blocks of rows
const int DEEP = 576;  // inputs: of so many, a block's activations and weights leave room in a core's first cache
const int EARLY = 128;  // inputs: weights are tiles so long before they are multiplied

// What the tile unit works on at once: up to 32 rows of bytes at x, two blocks of outputs at w, some of their inputs.
struct Block {
    const uint8_t* x;
    const int8_t* w;
    int depth, from, to;  // inputs `from` to `to` - 1 of `depth`
    int ahead;            // bytes of weights to ask for before they are needed, 0 where they are in a cache already
};

#ifdef LEFTFOLD_AMX
// Weights of a kilobyte from `w` on, on their way to the cache.
inline void fetch_tile(const int8_t* w) {
    for (int line = 0; line < 1024; line += 64) _mm_prefetch(reinterpret_cast<const char*>(w + line), _MM_HINT_T0);
}

// Sums for a block, acc[tile of rows][block of outputs][row][16], added to what is there unless `from` is 0. `between(k)` is
// called after 64 inputs from k on: other work, which the core does beside the tile unit's.
template <bool two, class Between>
INLINED inline void tile_products(const Block& b, int32_t (*acc)[2][16][16], Between&& between) {
    const int8_t *w = b.w, *w1 = w + size_t(b.depth) * 16;
    const uint8_t *x = b.x, *x1 = x + size_t(b.depth) * 16;
    in_order();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (b.from) {
        _tile_loadd(0, acc[0][0], 64);
        _tile_loadd(1, acc[0][1], 64);
        if (two) _tile_loadd(2, acc[1][0], 64);
        if (two) _tile_loadd(3, acc[1][1], 64);
    }
    for (int k = b.from; k < b.to; k += 64) {
        if (b.ahead) fetch_tile(w + k * 16 + b.ahead), fetch_tile(w1 + k * 16 + b.ahead);
        _tile_loadd(6, w + k * 16, 64);
        _tile_loadd(4, x + k, b.depth);
        _tile_loadd(7, w1 + k * 16, 64);
        if (two) _tile_loadd(5, x1 + k, b.depth);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        if (two) _tile_dpbusd(2, 5, 6);
        if (two) _tile_dpbusd(3, 5, 7);
        between(k);
    }
    _tile_stored(0, acc[0][0], 64);
    _tile_stored(1, acc[0][1], 64);
    if (two) _tile_stored(2, acc[1][0], 64);
    if (two) _tile_stored(3, acc[1][1], 64);
    in_order();
}

template <class Between>
INLINED inline void tile_products(const Block& b, int rows, int32_t (*acc)[2][16][16], Between&& between) {
    if (rows > 16) tile_products<true>(b, acc, between);
    else tile_products<false>(b, acc, between);
}
#else
template <class Between>
inline void tile_products(const Block&, int, int32_t (*)[2][16][16], Between&&) {}
#endif

#ifdef LEFTFOLD_VNNI
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
                const __m512i v = four_bytes(x + size_t(r) * depth + k + 4 * s);
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
    const Scale s = scale_of(x, n, 32767.0f);
    two_bytes(n, high, low, [&](int k) { return s.whole_at(x + k) + splat(32768); });
    return s.finite ? s.scale : NAN;
}

// Sums of a block of rows that are to become outputs, some rows at a time. Whoever gives them out does so from a copy of
// its own: a compiler keeps that in registers, whatever the sink writes.
template <class Sink>
struct Outputs {
    Sink sink;
    f16 scale[2] = {};
    i16 offset[2] = {};
    const float *bias = nullptr, *x_scale = nullptr;  // x_scale: of the first row
    const int32_t* sums = nullptr;                    // [tile of rows][block of outputs][row of bytes][16]
    int unit = 0, first = 0, done = 0, count = 0;     // rows: the first one's number, how many are given out, and are there

    Outputs(Sink s) : sink(s) {}

    void take(const LfLinear& l, int of_unit) {
        unit = of_unit;
        bias = l.bias ? l.bias + unit * 32 : nullptr;
        for (int b = 0; b < 2; b++) {
            scale[b] = load<f16>(l.scale + unit * 32 + b * 16);
            offset[b] = load<i16>(l.offset + unit * 32 + b * 16);
        }
    }

    INLINED f16 output(const int32_t* row, int b) const {
        const f16 high = to_float(load<i16>(row + b * 256) - offset[b]);
        const f16 total = joined(high, to_float(load<i16>(row + b * 256 + 16)));
        const f16 out = total * (x_scale[done] * scale[b]);
        return bias ? out + load<f16>(bias + 16 * b) : out;
    }

    INLINED void give(int most) {
        for (const int end = count - done < most ? count : done + most; done < end; done++) {
            const int32_t* row = sums + (done >> 3) * 512 + (done & 7) * 32;
            sink(unit, first + done, output(row, 0), output(row, 1));
        }
    }
};

// A thread's own memory for products.
struct Room {
    Buffer<int8_t> weights;  // of a unit, where they lie in memory otherwise
    Buffer<int32_t> sums;
};

// One thread's part of a product: some units of the weights (the outputs of the blocks 2 · unit and 2 · unit + 1) times the
// rows `first` (a multiple of 8) to `end` - 1 of activations x [2 · rows, depth], readable up to a multiple of 16 rows of
// bytes, with a scale each. `sink(unit, row, first, second)` takes sixteen outputs of both blocks. Sums of one of
// several blocks of rows become outputs at once: while all of it is in the first cache. Those of a single block do so
// while the next unit's are made, some rows at a time; `finish` gives out the last ones.
template <class Sink>
class Product {
  public:
    Product(const LfLinear& l, const uint8_t* x, const float* x_scale, int first, int end, Room& room, Sink sink)
        : l_(l), x_(x), x_scale_(x_scale), first_(2 * first), end_(2 * end), outputs_(sink) {
        if (tiles_ && at_once_) {
            const int parts = (l.depth + DEEP - 1) / DEEP;
            part_ = (l.depth / 64 + parts - 1) / parts * 64;
        }
        slots_ = part_ < l.depth ? blocks_ : at_once_ ? 1 : 2;
        fit(room.sums, size_t(slots_) * SUMS);
        if (l.bits < 8) fit(room.weights, l.size());
        sums_ = room.sums.data(), weights_ = room.weights.data();
    }

    void operator()(int unit) {
        if (l_.bits == 4) return narrow(unit);
        const int8_t* w = static_cast<const int8_t*>(l_.weight) + unit * l_.size();
        const int steps = l_.depth / 64;
        // From the second block of rows on the weights are at hand: time to ask for the next unit's.
        const bool more = blocks_ > 1 && 2 * unit + 2 < l_.blocks;
        const size_t bytes = more ? (l_.size() / ((blocks_ - 1) * steps) + 63) / 64 * 64 : 0;
        const int8_t *next = w + l_.size(), *end = next + l_.size();
        multiply(unit, w, unit == fetched_ ? 0 : AHEAD, [&](int low) INLINED {
            if (low > first_ && next < end) next = fetch(next, bytes);
        });
        if (more) fetched_ = unit + 1;
    }

    void finish() {
        Outputs<Sink> outputs = outputs_;
        outputs.give(16);
        outputs_.done = outputs.done;
    }

  private:
    static const int8_t* fetch(const int8_t* from, size_t bytes) {
        for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
        return from + bytes;
    }

    // `meanwhile(low)` is called after every 64 inputs of a block of rows from `low` on where the tile unit is at work.
    template <class Meanwhile>
    void multiply(int unit, const int8_t* w, int ahead, Meanwhile&& meanwhile) {
        for (int from = 0; from < l_.depth; from += part_)
            for (int low = first_; low < end_; low += ROWS) {
                const int to = from + part_ < l_.depth ? from + part_ : l_.depth;
                const Block block = {x_ + size_t(low) * l_.depth, w, l_.depth, from, to, low > first_ ? 0 : ahead};
                const int count = end_ - low < ROWS ? end_ - low : ROWS;
                turn_ = (turn_ + 1) % slots_;
                add(block, count, [&]() INLINED { meanwhile(low); });
                if (to < l_.depth) continue;
                take(unit, low, count);
                if (at_once_) finish();
            }
    }

    template <class Meanwhile>
    void add(const Block& b, int count, Meanwhile&& meanwhile) {
        auto acc = reinterpret_cast<int32_t(*)[2][16][16]>(sums_ + turn_ * SUMS);
        if (!tiles_) {
            vector_products(b.x, count, b.w, b.depth, acc);
            return finish();
        }
        if (at_once_) return tile_products(b, count, acc, [&](int) INLINED { meanwhile(); });
        Outputs<Sink> outputs = outputs_;
        const int times = l_.depth / 128, rows = times ? (16 + times - 1) / times : 16;
        tile_products(b, count, acc, [&](int k) INLINED {
            if (k & 64) outputs.give(rows);
            meanwhile();
        });
        outputs.give(16);
        outputs_.done = outputs.done;
    }

    // Weights of 4 bits: while the tile unit is at 64 inputs, those of a few inputs later become tiles.
    void narrow(int unit) {
        const uint8_t* groups = static_cast<const uint8_t*>(l_.weight) + unit * l_.stored();
#ifdef LEFTFOLD_VNNI
        if (end_ - first_ == 2) {
            finish();
            nibble_products(x_ + size_t(first_) * l_.depth, groups, l_.depth, reinterpret_cast<int32_t(*)[16][16]>(sums_));
            turn_ = 0;
            return take(unit, first_, 2);
        }
#endif
        int done = 0;
        auto widen_some = [&](int) {
            if (done < l_.depth) widen(groups, l_.depth, done, weights_), done += 64;
        };
        for (const int soon = tiles_ ? EARLY : l_.depth; done < soon && done < l_.depth;) widen_some(0);
        multiply(unit, weights_, 0, widen_some);
    }

    void take(int unit, int low, int count) {
        outputs_.take(l_, unit);
        outputs_.sums = sums_ + turn_ * SUMS, outputs_.x_scale = x_scale_ + low / 2;
        outputs_.first = low / 2, outputs_.done = 0, outputs_.count = count / 2;
    }

    const LfLinear& l_;
    const uint8_t* x_;
    const float* x_scale_;
    const int first_, end_;  // rows of bytes
    const int blocks_ = (end_ - first_ + ROWS - 1) / ROWS;
    const bool tiles_ = tiles_allowed(), at_once_ = blocks_ >= MANY;
    Outputs<Sink> outputs_;
    int part_ = l_.depth;  // inputs that all rows are multiplied with before the next
    int slots_ = 2, turn_ = 0;
    int32_t* sums_;
    int8_t* weights_;
    int fetched_ = -1;  // the unit whose weights were asked for
};

template <class Sink>
inline Product<Sink> product(
    const LfLinear& l, const uint8_t* x, const float* x_scale, int first, int end, Room& room, Sink sink) {
    return Product<Sink>(l, x, x_scale, first, end, room, sink);
}

}  // namespace lf
