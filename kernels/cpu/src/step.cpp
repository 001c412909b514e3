// A transformer step of the Llama family in one call: embedding, blocks, final norm; and scores over the vocabulary.
//
// The arithmetic is defined by ../reference.py; every function gives the same bits. Work is handed out in units of
// outputs, rows or (row, KV head) pieces, each computed whole by one thread, so nothing depends on who does it.
#include <algorithm>
#include <memory>

#include "attention.h"
#include "linear.h"
#include "pool.h"

using namespace lf;

extern "C" {

struct LfLayer {
    const float* attention_norm;
    const float* q_norm;  // or null
    const float* k_norm;  // or null
    const float* mlp_norm;
    LfLinear qkv, output, gate_up, down;  // gate_up: blocks of the gate and of the other half take turns
    int64_t window;                       // 0: none
};

struct LfModel {
    int32_t layers, hidden, inner, heads, kv_heads, head_dim, page_size, blocks;
    float eps, score_scale;  // score_scale: head_dim^-1/2 · log2(e)
    const LfLayer* layer;
    const float* norm;
    const float *cos, *sin;  // [positions, head_dim]
    LfLinear embedding, head;
};

struct LfStep {
    int32_t tokens, rows;
    const int64_t *ids, *positions, *places;  // [tokens]
    const int64_t *starts, *lengths;          // [rows]
    const int64_t* pages;                     // [rows, widest]
    int64_t widest;
    const LfMemory* memory;  // [layers]
    float* hidden;           // [tokens, hidden]
};
}

namespace {

// Room for activations of `rows` rows: bytes, readable up to a multiple of 16 rows of bytes, and a scale each.
struct Activations {
    Buffer<uint8_t> bytes;
    Buffer<float> scales;

    void fit(int rows, int depth) {
        const size_t size = size_t((2 * rows + 31) / 32) * 32 * depth;
        lf::fit(bytes, size);
        lf::fit(scales, size_t(rows));
    }

    void take(int row, const float* x, int n, int depth) {
        uint8_t* high = bytes.data() + size_t(2 * row) * depth;
        std::memset(high + n, 0, depth - n);
        std::memset(high + depth + n, 0, depth - n);
        scales[row] = quantize_row(x, n, high, high + depth);
    }
};

}  // namespace

const int APART = 6;
const int LOOK = 600;  // products with a weight: what a head's look at one token takes as long as

struct LfEngine {
    Pool pool;
    Activations wide, narrow, inner;
    Queries queries;
    Buffer<float> x, values;  // values: a token's queries, keys and values; then what it sees; then inside the MLP
    size_t width = 0;         // of a token's values
    bool apart = false;
    std::vector<int> bound, pieces_of;
    std::vector<Piece> pieces;
    std::vector<Scratch> scratch;
    std::vector<Room> room;

    explicit LfEngine(int threads) : pool(threads), scratch(threads), room(threads) {}

    void forward(const LfModel& m, const LfStep& s);
    void scores(const LfModel& m, const float* hidden, int rows, float* out);

  private:
    void embed(const LfModel& m, int64_t id, float* x);
    void divide(const LfModel& m, const LfStep& s);
    static double products(const LfModel& m);
    static double looks(const LfModel& m, int64_t context);
    void cut(const LfModel& m, const LfStep& s);
    void place(const LfModel& m, const LfLayer& l, const LfStep& s, const LfMemory& memory, int token);
};

// A row of the embedding: the head's weights in their tiles, of 8 bits.
void LfEngine::embed(const LfModel& m, int64_t id, float* x) {
    const LfLinear& e = m.embedding;
    const int8_t* w = static_cast<const int8_t*>(e.weight) + (id >> 4) * size_t(e.depth) * 16 + (id & 15) * 4;
    const float scale = e.scale[id];
    for (int k = 0; k < m.hidden; k += 4)
        for (int i = 0; i < 4; i++) x[k + i] = float(w[k * 16 + i]) * scale;
}

// Where rows are many each worker computes its own, so that what it writes stays in its cache and only attention waits for
// the others; `bound[worker]` is its first one. But then each reads all weights, the more often the larger the team: where
// rows are few, all share all work in pieces. (Two workers: equal at 16 rows, a fifth faster at 32, a third at 128.)
void LfEngine::divide(const LfModel& m, const LfStep& s) {
    const int team = pool.size();
    apart = team > 1 && s.tokens >= APART * team * team;
    bound.assign(team + 1, s.tokens);
    bound[0] = 0;
    if (!apart) return;
    const double each = products(m);
    std::vector<double> work(1, 0.0);  // of all tokens before
    for (int token = 0; token < s.tokens; token++) work.push_back(work.back() + each + looks(m, s.positions[token] + 1));
    for (int worker = 1, token = 0; worker < team; worker++) {
        while (work[token] < work.back() * worker / team) token++;
        bound[worker] = std::min((token + 4) / 8 * 8, s.tokens);
    }
}

// Products with a weight that every token takes.
double LfEngine::products(const LfModel& m) {
    double sum = 0;
    for (const LfLayer* l = m.layer; l < m.layer + m.layers; l++)
        for (const LfLinear* part : {&l->qkv, &l->output, &l->gate_up, &l->down}) sum += double(part->outputs) * part->inputs;
    return sum;
}

// What a token with so many to look at, itself among them, takes beside these: as many products as take so long.
double LfEngine::looks(const LfModel& m, int64_t context) {
    int64_t seen = 0;
    for (const LfLayer* l = m.layer; l < m.layer + m.layers; l++)
        seen += l->window && l->window < context ? l->window : context;
    return double(LOOK) * m.heads * seen;
}

// Pieces of at most 16 query vectors of one worker's rows; `pieces_of[worker]`: the first piece of each.
void LfEngine::cut(const LfModel& m, const LfStep& s) {
    const int shared = m.heads / m.kv_heads, most = shared < 16 ? 16 / shared : 1;
    pieces.clear();
    pieces_of.assign(1, 0);
    for (int row = 0, token = 0; row < s.rows; row++)
        for (int64_t done = 0; done < s.lengths[row];) {
            while (token == bound[pieces_of.size()]) pieces_of.push_back(int(pieces.size()));
            const int own = int(std::min<int64_t>(s.lengths[row] - done, bound[pieces_of.size()] - token));
            for (int head = 0; head < m.kv_heads; head++)  // its keys and values stay near while its pieces are worked on
                for (int at = 0; at < own; at += most)
                    pieces.push_back({row, token + at, std::min(most, own - at), head, s.starts[row] + done + at});
            done += own, token += own;
        }
    pieces_of.resize(bound.size(), int(pieces.size()));
}

template <class V>
static void rotate(const float* x, const float* cos, const float* sin, int half, float* out) {
    for (int d = 0; d < half; d += int(sizeof(V) / sizeof(float))) {
        const V first = load<V>(x + d), second = load<V>(x + d + half);
        store(out + d, first * load<V>(cos + d) - second * load<V>(sin + d));
        store(out + d + half, second * load<V>(cos + d + half) + first * load<V>(sin + d + half));
    }
}

// One token's queries, keys and values: normed, rotated, as whole numbers, keys and values in their place.
void LfEngine::place(const LfModel& m, const LfLayer& l, const LfStep& s, const LfMemory& memory, int token) {
    const int size = m.head_dim;
    const float* from = values.data() + token * width;
    const float *cos = m.cos + s.positions[token] * size, *sin = m.sin + s.positions[token] * size;
    const int64_t page = s.places[token] / m.page_size, offset = s.places[token] % m.page_size;
    const size_t lane = offset % 16, block = page * m.kv_heads * m.blocks + offset / 16, bytes = size_t(size) * 16;
    for (int head = 0; head < m.kv_heads; head++) {  // on their way while the queries are made
        const size_t at = block + head * m.blocks;
        for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(memory.keys + at * bytes + line, 1);
        for (int line = 0; line < size * 4; line += 64)
            __builtin_prefetch(memory.values + at * bytes + (lane >> 2) * size * 4 + line, 1);
        __builtin_prefetch(memory.key_scales + at * 16, 1);
        __builtin_prefetch(memory.value_scales + at * 16, 1);
    }
    alignas(64) float normed[256], turned[256];
    auto rotated = [&](const float* norm) {
        if (norm) rms_norm(from, norm, size, m.eps, normed);
        const float* x = norm ? normed : from;
        if (size % 32) rotate<f8>(x, cos, sin, size / 2, turned);
        else rotate<f16>(x, cos, sin, size / 2, turned);
        from += size;
    };
    for (int head = 0; head < m.heads; head++) {
        rotated(l.q_norm);
        const size_t at = queries.at(head / queries.shared, token) + head % queries.shared;
        int8_t *high = queries.bytes.data() + at * 2 * size, *low = high + size;
        i16 total = splat(0);
        const Scale scale = quantize(turned, size, 16256.0f, [&](int k, i16 q16) {
            total = total + q16;
            store(high + k, __builtin_convertvector(q16 >> 7, b16));
            store(low + k, __builtin_convertvector(q16 & splat(127), b16));
        });
        queries.offset[at] = 128 * sum(total);
        queries.scale[at] = scale.scale * m.score_scale;
    }
    for (int head = 0; head < m.kv_heads; head++) {
        rotated(l.k_norm);
        const size_t at = block + head * m.blocks;
        uint8_t* to = memory.keys + at * bytes + lane * 4;
        const Scale scale = quantize(turned, size, 127.0f, [&](int k, i16 q) {
            const u16 sixteen = __builtin_convertvector(q + splat(128), u16);
            for (int i = 0; i < 4; i++)
                std::memcpy(to + (k / 4 + i) * 64, reinterpret_cast<const uint8_t*>(&sixteen) + 4 * i, 4);
        });
        memory.key_scales[at * 16 + lane] = scale.scale;
    }
    for (int head = 0; head < m.kv_heads; head++, from += size) {
        const size_t at = block + head * m.blocks;
        int8_t* to = memory.values + at * bytes + (lane >> 2) * size * 4;
        const Scale scale = quantize(from, size, 127.0f, [&](int k, i16 q) { every_fourth(to + k * 4, lane & 3, q); });
        memory.value_scales[at * 16 + lane] = scale.scale;
    }
}

void LfEngine::forward(const LfModel& m, const LfStep& s) {
    const int n = s.tokens, hidden = m.hidden, q_size = m.heads * m.head_dim;
    const Heads heads = {m.heads, m.kv_heads, m.head_dim, m.page_size, m.blocks};
    width = std::max({m.layer[0].qkv.blocks * 16, q_size, m.inner});
    fit(x, size_t(n) * hidden), fit(values, n * width);
    fit(queries.bytes, size_t(n) * q_size * 2);
    fit(queries.offset, size_t(n) * m.heads), fit(queries.scale, size_t(n) * m.heads);
    wide.fit(n, m.layer[0].qkv.depth), narrow.fit(n, m.layer[0].output.depth), inner.fit(n, m.layer[0].down.depth);
    queries.tokens = n, queries.shared = m.heads / m.kv_heads;
    divide(m, s);
    cut(m, s);
    for (Scratch& own : scratch) own.vectors = 0;
    pool.run([&](int worker) {
        tiles_on();
        const int first = bound[worker], end = bound[worker + 1];
        auto rows = [&](auto one) {
            if (!apart) return pool.share(worker, n, one);
            for (int row = first; row < end; row++) one(row);
        };
        auto linear = [&](const LfLinear& l, const Activations& a, auto sink) {
            auto part = product(
                l, a.bytes.data(), a.scales.data(), apart ? first : 0, apart ? end : n, room[worker], sink);
            if (!apart) return pool.share(worker, l.blocks / 2, part, [&] { part.finish(); });
            for (int unit = 0; unit < l.blocks / 2; unit++) part(unit);
            part.finish();
        };
        Buffer<float> normed(hidden);
        auto norm_row = [&](int row, const float* weight, int depth) {
            rms_norm(x.data() + size_t(row) * hidden, weight, hidden, m.eps, normed.data());
            wide.take(row, normed.data(), hidden, depth);
        };
        auto add = [&](int unit, int row, f16 a, f16 b) {
            float* to = x.data() + size_t(row) * hidden + unit * 32;
            store(to, load<f16>(to) + a);
            if (unit * 32 + 16 < hidden) store(to + 16, load<f16>(to + 16) + b);
        };
        rows([&](int row) {
            embed(m, s.ids[row], x.data() + size_t(row) * hidden);
            norm_row(row, m.layer[0].attention_norm, m.layer[0].qkv.depth);
        });
        for (int layer = 0; layer < m.layers; layer++) {
            const LfLayer& l = m.layer[layer];
            const LfMemory& memory = s.memory[layer];
            linear(l.qkv, wide, [&](int unit, int row, f16 a, f16 b) {
                float* to = values.data() + row * width + unit * 32;
                store(to, a), store(to + 16, b);
            });
            rows([&](int token) { place(m, l, s, memory, token); });
            auto piece = [&](int i) {
                const int64_t* pages = s.pages + pieces[i].row * s.widest;
                attend(pieces[i], heads, memory, queries, pages, l.window, scratch[worker], values.data(), width);
            };
            auto after = [&] { tiles_on(), scratch[worker].vectors = 0; };
            if (apart) {
                pool.meet();  // all keys and values are there
                for (int i = pieces_of[worker]; i < pieces_of[worker + 1]; i++) piece(i);
                after();
            } else {
                pool.share(worker, int(pieces.size()), piece, after);
            }
            rows([&](int row) { narrow.take(row, values.data() + row * width, q_size, l.output.depth); });
            linear(l.output, narrow, add);
            rows([&](int row) { norm_row(row, l.mlp_norm, l.gate_up.depth); });
            linear(l.gate_up, wide, [&](int unit, int row, f16 gate, f16 up) {
                store(values.data() + row * width + unit * 16, silu_mul(gate, up));
            });
            rows([&](int row) { inner.take(row, values.data() + row * width, m.inner, l.down.depth); });
            linear(l.down, inner, add);
            const bool last = layer + 1 == m.layers;
            rows([&](int row) {
                if (!last) return norm_row(row, m.layer[layer + 1].attention_norm, m.layer[layer + 1].qkv.depth);
                rms_norm(x.data() + size_t(row) * hidden, m.norm, hidden, m.eps, s.hidden + size_t(row) * hidden);
            });
        }
        tiles_off();
    });
}

void LfEngine::scores(const LfModel& m, const float* hidden, int rows, float* out) {
    const LfLinear& l = m.head;
    wide.fit(rows, l.depth);
    pool.run([&](int worker) {
        tiles_on();
        pool.share(worker, rows, [&](int row) { wide.take(row, hidden + size_t(row) * m.hidden, m.hidden, l.depth); });
        auto part = product(
            l, wide.bytes.data(), wide.scales.data(), 0, rows, room[worker], [&](int unit, int row, f16 a, f16 b) {
            const int first = unit * 32;
            float* to = out + size_t(row) * l.outputs + first;
            if (first + 32 <= l.outputs) {
                store(to, a), store(to + 16, b);
            } else {
                float tail[32];
                store(tail, a), store(tail + 16, b);
                std::memcpy(to, tail, sizeof(float) * (l.outputs - first));
            }
        });
        pool.share(worker, l.blocks / 2, part, [&] { part.finish(); });
        tiles_off();
    });
}

extern "C" {

// 0: loops, 1: vector dot products, 2: the tile unit.
int lf_level() {
#ifdef LEFTFOLD_VNNI
    return tiles_allowed() ? 2 : 1;
#else
    return 0;
#endif
}

LfEngine* lf_engine(int threads) {
    tiles_allowed();  // asked for before any thread is there, so that all of them may
    return new LfEngine(threads);
}

void lf_close(LfEngine* engine) { delete engine; }

void lf_forward(LfEngine* engine, const LfModel* model, const LfStep* step) { engine->forward(*model, *step); }

void lf_scores(LfEngine* engine, const LfModel* model, const float* hidden, int rows, float* out) {
    engine->scores(*model, hidden, rows, out);
}

// The first largest of each row of scores, index and value; the value is no number where one of the row is none.
void lf_best(LfEngine* engine, const float* scores, int rows, int width, int64_t* best, float* top) {
    auto row_best = [&](int row) {
        const float* s = scores + size_t(row) * width;
        f16 most = splat(-INFINITY);
        i16 broken = splat(0);
        int k = 0;
        for (; k + 16 <= width; k += 16) {
            const f16 v = load<f16>(s + k);
            broken |= v != v;
            most = max(v, most);
        }
        float value = largest(most);
        bool bad = false;
        for (int i = 0; i < 16; i++) bad |= broken[i] != 0;
        for (; k < width; k++) {
            bad |= s[k] != s[k];
            value = s[k] > value ? s[k] : value;
        }
        int64_t at = 0;
        while (!bad && at < width - 1 && s[at] != value) at++;
        best[row] = at;
        top[row] = bad ? NAN : value;
    };
    if (rows < 3) {
        for (int row = 0; row < rows; row++) row_best(row);
        return;
    }
    engine->pool.run([&](int worker) { engine->pool.share(worker, rows, row_best); });
}

// Linear alone, for tests: out [rows, blocks · 16].
void lf_linear(LfEngine* engine, const LfLinear* l, const float* x, int rows, float* out) {
    Activations a;
    a.fit(rows, l->depth);
    engine->pool.run([&](int worker) {
        tiles_on();
        engine->pool.share(worker, rows, [&](int row) { a.take(row, x + size_t(row) * l->inputs, l->inputs, l->depth); });
        auto part = product(
            *l, a.bytes.data(), a.scales.data(), 0, rows, engine->room[worker], [&](int unit, int row, f16 first, f16 second) {
            float* to = out + size_t(row) * l->blocks * 16 + unit * 32;
            store(to, first), store(to + 16, second);
        });
        engine->pool.share(worker, l->blocks / 2, part, [&] { part.finish(); });
        tiles_off();
    });
}
}
