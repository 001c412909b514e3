// Causal attention over pages of 8-bit keys and values, without gathering them.
//
// A key or value is 64 (head_dim) whole numbers -127 … 127 with a scale of its own. A page has, for each KV head, blocks
// of 16 tokens: keys as [head_dim/4][16 tokens][4] unsigned bytes (128 added), values as [4][head_dim][4 tokens] signed
// ones. A score is an exact whole number times three scales. The largest one is exact in any order; weights are
// 2^(score - largest), which become 16-bit whole numbers of a common scale once the value's own is in them; their sums,
// and those of the products with the values, are exact again. So a token's result depends on its context alone: not on
// its page ids, on the page size, on who else is in the batch, or on the order in which anything is summed.
#pragma once

#include "attention_products.h"

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

// Queries of the step: two signed bytes each, q = 128 · high + low. Those of one KV head's query heads lie together, and
// of consecutive tokens one after the other: [kv_heads, tokens, heads / kv_heads, 2, head_dim].
struct Queries {
    Buffer<int8_t> bytes;
    Buffer<int32_t> offset;  // of each: 128 · its sum, which the 128 added to keys brings in
    Buffer<float> scale;     // of its scores, the softmax's own and log2(e) included
    int tokens = 0, shared = 1;

    size_t at(int kv_head, int token) const { return (size_t(kv_head) * tokens + token) * shared; }
};

// Up to 16 query vectors (tokens · heads per KV head) of one row and KV head.
struct Piece {
    int row, first, count, kv_head;  // `first`: token of the step
    int64_t start;                   // its position
};

struct Scratch {
    Buffer<float> scores;       // [16, width]
    Buffer<uint8_t> high, low;  // of weights, [16, width]
    Buffer<int64_t> slots;      // of each block of context: page · blocks + block
    int vectors = 0;            // that the tile unit is set up for
};

const int NEAR = 2;  // blocks of keys to ask for before they are needed

// The blocks of context that a piece sees, and the first one's place in its page table.
inline int64_t blocks_of(const Piece& p, const Heads& h, const int64_t* pages, int64_t window, Buffer<int64_t>& slots) {
    const int64_t end = p.start + p.count, from = window && p.start >= window ? p.start - window + 1 : 0;
    const int64_t first_page = from / h.page_size;
    slots.clear();
    for (int64_t page = first_page; page * h.page_size < end; page++)
        for (int b = 0; b < h.blocks && page * h.page_size + b * 16 < end; b++)
            slots.push_back((pages[page] * h.kv_heads + p.kv_head) * h.blocks + b);
    return first_page;
}

inline void fetch(const void* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at);
}

// Scores of a piece's vectors over its blocks, -infinity where a token does not see; the largest of each in `top`.
inline void score(
    const Piece& p, const Heads& h, const LfMemory& memory, const Queries& queries, int64_t page, int64_t window,
    const Buffer<int64_t>& slots, size_t width, float* scores, float* top) {
    const int vectors = p.count * queries.shared;
    const size_t stride = size_t(h.head_dim) * 16, at = queries.at(p.kv_head, p.first);
    const i16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t last = p.start + p.count - 1, hidden = window && last >= window ? last - window + 1 : 0;
    alignas(64) int32_t dots[2][16][16];
    f16 most[16];
    int64_t position[16];
    for (int v = 0; v < vectors; v++) most[v] = splat(-INFINITY), position[v] = p.start + v / queries.shared;
    const KeyProducts products(queries.bytes.data() + at * 2 * h.head_dim, vectors, h.head_dim);
    int64_t block = 0;
    for (size_t b = 0; b < slots.size(); b++) {
        if (b + NEAR < slots.size()) fetch(memory.keys + size_t(slots[b + NEAR]) * stride, stride);
        fetch(memory.values + size_t(slots[b]) * stride, stride);
        products(memory.keys + size_t(slots[b]) * stride, dots);
        const f16 key_scale = load<f16>(memory.key_scales + slots[b] * 16);
        const int64_t base = page * h.page_size + block * 16;
        const int64_t held = h.page_size - block * 16 < 16 ? h.page_size - block * 16 : 16;
        if (++block == h.blocks) block = 0, page++;
        const bool whole = held == 16 && base + 15 <= p.start && base >= hidden;
        for (int v = 0; v < vectors; v++) {
            const i16 dot = (load<i16>(dots[0][v]) << 7) + load<i16>(dots[1][v]) - splat(queries.offset[at + v]);
            f16 s = (to_float(dot) * key_scale) * splat(queries.scale[at + v]);
            if (!whole) {
                const int64_t own = position[v], since = window && own >= window ? own - window + 1 : 0;
                const int64_t low = since - base, high = own + 1 - base < held ? own + 1 - base : held;
                const i16 seen = (lanes >= splat(int32_t(low < 0 ? 0 : low < 16 ? low : 16))) &
                                 (lanes < splat(int32_t(high < 0 ? 0 : high)));
                s = seen ? s : splat(-INFINITY);
            }
            most[v] = max(s, most[v]);
            store(scores + v * width + b * 16, s);
        }
    }
    for (int v = 0; v < vectors; v++) top[v] = largest(most[v]);
}

// What the softmax weights of one vector, the values' scales in them, are times to be whole numbers, and the scale of these.
struct Common {
    float inverse, scale;
};

// Scores of one vector become softmax weights with the values' scales in them.
inline Common weigh(float* scores, float top, const float* value_scales, const Buffer<int64_t>& slots) {
    i16 mass = splat(0);
    int64_t total = 0;
    f16 heaviest = splat(0.0f);
    for (size_t b = 0; b < slots.size(); b++) {
        const f16 y = load<f16>(scores + b * 16) - splat(top);
        const f16 weight = y >= splat(-125.0f) ? exp2(max(y, splat(-125.0f))) : splat(0.0f);
        mass = mass + whole(weight * splat(1048576.0f));
        const f16 scaled = weight * load<f16>(value_scales + slots[b] * 16);
        heaviest = max(scaled, heaviest);
        store(scores + b * 16, scaled);
        if ((b & 63) == 63 || b + 1 == slots.size()) {  // 64 · 16 · 2^20 is what 32 bits hold
            total += sum(mass);
            mass = splat(0);
        }
    }
    const float heavy = largest(heaviest), inverse = heavy > 0.0f ? 65535.0f / heavy : 0.0f;
    if (!(inverse > 0.0f && inverse < 3.0e38f)) return {0.0f, 0.0f};
    return {inverse, (heavy / 65535.0f) / (float(total) * (1.0f / 1048576.0f))};
}

// `pages`: of the piece's row; `window`: how far back a token sees, 0 for all; `out` [tokens, out_width]: of a
// token [heads, head_dim].
inline void attend(
    const Piece& p, const Heads& h, const LfMemory& memory, const Queries& queries, const int64_t* pages, int64_t window,
    Scratch& scratch, float* out, size_t out_width) {
    const int vectors = p.count * queries.shared;
    const int64_t first_page = blocks_of(p, h, pages, window, scratch.slots);
    const size_t width = scratch.slots.size() * 16;
    if (scratch.scores.size() < width * 16) {
        scratch.scores.resize(width * 16);
        scratch.high.resize(width * 16);
        scratch.low.resize(width * 16);
    }
    if (scratch.vectors != vectors) attention_tiles(scratch.vectors = vectors);
    float top[16];
    Common common[16];
    score(p, h, memory, queries, first_page, window, scratch.slots, width, scratch.scores.data(), top);
    for (int v = 0; v < vectors; v++)
        common[v] = weigh(scratch.scores.data() + v * width, top[v], memory.value_scales, scratch.slots);
    for (int v = 0; v < vectors; v++) {
        const float* weight = scratch.scores.data() + v * width;
        const float inverse = common[v].inverse;
        two_bytes(int(width), scratch.high.data() + v * width, scratch.low.data() + v * width, [&](int at) {
            return inverse > 0.0f ? whole(load<f16>(weight + at) * inverse) : splat(0);
        });
    }
    const Weights weights = {scratch.high.data(), scratch.low.data(), width, vectors};
    float* to[16];
    for (int v = 0, token = p.first; v < vectors; token++)
        for (int head = p.kv_head * queries.shared, i = 0; i < queries.shared; i++)
            to[v++] = out + token * out_width + (head + i) * h.head_dim;
    value_products(memory.values, scratch.slots, weights, h.head_dim, [&](int v, int d, f16 sums) {
        store(to[v] + d, sums * common[v].scale);
    });
}

}  // namespace lf
