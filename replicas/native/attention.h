// Attention over paged KV on a CPU: plain C++ that the compiler vectorises, called through a C interface.
//
// Layouts ("hdt-htd"): K is [block, kv_head, dim, token], V is [block, kv_head, token, dim]. Queries are [token, head, dim] with
// any strides, outputs are packed. Slots that the request has not written are never used, so stale content, NaN included, cannot leak.
// The result of a row does not depend on the rows computed with it: whole, chunked, batched or alone, it is the same to the bit.
// The softmax is computed online over chunks of tokens (Milakov & Gimelshein, arXiv 1805.02867; FlashAttention,
// arXiv 2205.14135). A chunk's keys and values are first converted to words that the rows of a tile share. A word is one float; where
// the CPU multiplies pairs of bfloat16, a word is two neighbouring dims of a key or two neighbouring tokens of a value, and queries
// and weights are rounded to bfloat16 too. The plain reference is replicas/attention/reference.py.

#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "bfloat16_dot.h"
#include "team.h"
#include "vector.h"

namespace manta {

constexpr int CHUNK = 128;       // tokens between two updates of the running softmax
constexpr int SPAN = 2 * WIDTH;  // tokens whose scores, or dims whose sums, are computed together
constexpr int BLOCKS_AHEAD = 2;  // blocks of keys prefetched ahead of use: blocks lie anywhere in memory
constexpr int64_t FEW_WRITES = 16;  // tokens whose keys and values one thread writes
constexpr int QUERY_ROWS = 96;   // rows that share a chunk's words

struct Shape {
    int64_t num_heads, num_kv_heads, k_dim, v_dim, block_size;
    int64_t q_token_stride, q_head_stride;
    float scale, softcap;  // softcap 0 means none
    int64_t window;        // 0 means none; else a row at position p sees p - window + 1 .. p
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How numbers of type KV are multiplied: a word holds STEP of them, which multiply STEP numbers of type Number.
template <typename KV>
struct Product {
    static constexpr int STEP = 1;
    using Number = float;
    static uint32_t word(const KV* first, const KV*) {
        const float value = to_float(*first);
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    }
    static void add(Vector& sum, const Words& a, const Words& b) { sum += as_floats(a) * as_floats(b); }
};
#ifdef MANTA_BF16_DOT
template <>
struct Product<BFloat16> {
    static constexpr int STEP = 2;
    using Number = BFloat16;
    static uint32_t word(const BFloat16* first, const BFloat16* second) { return first->bits | static_cast<uint32_t>(second->bits) << 16; }
    static void add(Vector& sum, const Words& a, const Words& b) { add_dot(sum, a, b); }
};
#endif

// sum[r] += a[r][i] * b[i][0 .. SPAN) for `num` words i. Strides of a are in numbers, strides of b in words.
template <int R, typename P>
inline __attribute__((always_inline)) void add_words(const typename P::Number* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                                                     int64_t num, Vector sum[R][2]) {
    for (int64_t i = 0; i < num; ++i) {
        Words words[2];
        UNROLL for (int v = 0; v < 2; ++v) std::memcpy(&words[v], b + i * b_stride + v * WIDTH, sizeof words[v]);
        UNROLL for (int r = 0; r < R; ++r) {
            uint32_t word;
            std::memcpy(&word, a + r * a_stride + i * P::STEP, sizeof word);
            const Words same = Words{} + word;
            UNROLL for (int v = 0; v < 2; ++v) P::add(sum[r][v], same, words[v]);
        }
    }
}

// An array aligned to cache lines: a vector that crosses two lines takes twice as long to load.
template <typename T>
class Lines {
    struct alignas(64) Line {
        T numbers[64 / sizeof(T)];
    };
    std::vector<Line> lines;

  public:
    explicit Lines(int64_t num) : lines(divide_up(num * sizeof(T), sizeof(Line))) {}
    T* begin() { return lines.data()->numbers; }
    T& operator[](int64_t i) { return begin()[i]; }
    const T& operator[](int64_t i) const { return lines.data()->numbers[i]; }
};

// The keys of one kv head, from block 0 on, and the block table of one request.
template <typename KV>
struct PagedKeys {
    const KV* keys;
    const int32_t* table;
    int64_t num_blocks;
};

// One tile: consecutive query tokens of one request times the query heads of one kv head.
template <typename Q, typename KV>
struct Tile {
    using P = Product<KV>;
    using Number = typename P::Number;
    static constexpr int STEP = P::STEP;

    const Shape& s;
    const int64_t group, k_words, v_width;  // v_width: dims of a value and of a sum, with padding
    int64_t num_rows = 0, first_position = 0;
    Lines<Number> q;             // [row, k_words * STEP]
    Lines<float> acc;            // [row, v_width]
    Lines<float> row_max;        // [row], padded by a whole vector
    Lines<float> row_sum;        // [row, WIDTH], summed at the end
    Lines<uint32_t> keys;        // [CHUNK / SPAN, k_words, SPAN]
    Lines<uint32_t> values;      // [CHUNK / STEP, v_width]
    std::vector<KV> nothing;     // the value of a token outside the chunk
    alignas(64) float scores[MAX_ROWS][CHUNK];
    alignas(64) Number weights[MAX_ROWS][CHUNK];

    Tile(const Shape& shape, int64_t max_rows)
        : s(shape),
          group(s.num_heads / s.num_kv_heads),
          k_words(divide_up(s.k_dim, STEP)),
          v_width(divide_up(s.v_dim, SPAN) * SPAN),
          q(max_rows * k_words * STEP),
          acc(max_rows * v_width),
          row_max(max_rows + WIDTH),
          row_sum(max_rows * WIDTH),
          keys(k_words * CHUNK),
          values(CHUNK / STEP * v_width),
          nothing(s.v_dim) {}

    // Row r is query token r / group, query head kv_head * group + r % group.
    void load_queries(const Q* query, int64_t first_token, int64_t num_tokens, int64_t kv_head) {
        num_rows = num_tokens * group;
        for (int64_t r = 0; r < num_rows; ++r) {
            const Q* from = query + (first_token + r / group) * s.q_token_stride + (kv_head * group + r % group) * s.q_head_stride;
            Number* to = &q[r * k_words * STEP];
#pragma omp simd
            for (int64_t d = 0; d < s.k_dim; ++d) store(to + d, to_float(from[d]));
        }
        std::fill_n(acc.begin(), num_rows * v_width, 0.0f);
        std::fill_n(row_max.begin(), num_rows, std::numeric_limits<float>::lowest());
        std::fill_n(row_sum.begin(), num_rows * WIDTH, 0.0f);
    }

    // `k` and `v` are the kv head's part of block 0; its part of the next block lies `k_stride` and `v_stride` later. The first keys of
    // `next`, which this thread probably processes afterwards, are prefetched at the end.
    void attend(const KV* k, int64_t k_stride, const KV* v, int64_t v_stride, const int32_t* table, int64_t position,
                const PagedKeys<KV>& next) {
        first_position = position;
        const int64_t end = position + num_rows / group, num_blocks = divide_up(end, s.block_size);
        const int64_t low = s.window > 0 ? std::max<int64_t>(position - s.window + 1, 0) : 0;
        for (int64_t base = low / CHUNK * CHUNK; base < end; base += CHUNK) {
            const int64_t begin = std::max(base, low / s.block_size * s.block_size);
            const int64_t chunk_end = std::min<int64_t>(base + CHUNK, end);
            for (int64_t t = begin; t < chunk_end;) {
                const int64_t offset = t % s.block_size, count = std::min({s.block_size - offset, chunk_end - t, SPAN - t % SPAN});
                const int64_t ahead = t / s.block_size + BLOCKS_AHEAD;
                if (offset == 0 && ahead < num_blocks)
                    fetch(k + table[ahead] * k_stride, s.k_dim * s.block_size);
                else if (offset == 0 && ahead - num_blocks < next.num_blocks)
                    fetch(next.keys + next.table[ahead - num_blocks] * k_stride, s.k_dim * s.block_size);
                fetch(v + table[t / s.block_size] * v_stride + offset * s.v_dim, count * s.v_dim);
                lay_keys(k + table[t / s.block_size] * k_stride + offset, count, &keys[(t - base) / SPAN * SPAN * k_words + t % SPAN]);
                t += count;
            }
            const auto value_of = [&](int64_t t) {
                return t < begin || t >= chunk_end ? nothing.data() : v + table[t / s.block_size] * v_stride + t % s.block_size * s.v_dim;
            };
            for (int64_t t = begin / STEP * STEP; t < chunk_end; t += STEP)
                lay_values(value_of(t), value_of(t + STEP - 1), &values[(t - base) / STEP * v_width]);
            const int64_t num_groups = divide_up(num_rows, MAX_ROWS);
            for (int64_t g = 0; g < num_groups; ++g) {
                const int64_t r = g * num_rows / num_groups;
                with_rows((g + 1) * num_rows / num_groups - r, [&](auto rows) { attend_rows<decltype(rows)::value>(r, base); });
            }
        }
    }

    static void fetch(const KV* from, int64_t num) {
        for (int64_t i = 0; i < num; i += 64 / static_cast<int64_t>(sizeof(KV))) __builtin_prefetch(from + i, 0, 2);
    }

    // Converts the keys of `count` tokens of one block to words.
    void lay_keys(const KV* from, int64_t count, uint32_t* to) const {
        for (int64_t i = 0; i < k_words; ++i, to += SPAN) {
            const KV* first = from + i * STEP * s.block_size;
            const KV* second = STEP == 1 || i * STEP + 1 < s.k_dim ? first + (STEP - 1) * s.block_size : first;
            if (count == LANES)
                for (int64_t t = 0; t < LANES; ++t) to[t] = P::word(first + t, second + t);
            else
                for (int64_t t = 0; t < count; ++t) to[t] = P::word(first + t, second + t);
        }
    }

    void lay_values(const KV* first, const KV* second, uint32_t* to) const {
#pragma omp simd
        for (int64_t d = 0; d < s.v_dim; ++d) to[d] = P::word(first + d, second + d);
    }

    // Attends with rows r .. r + R - 1 over a chunk.
    template <int R>
    void attend_rows(int64_t r, int64_t base) {
        const int64_t low = seen(r, base).first, high = seen(r + R - 1, base).second;
        if (low >= high) return;
        const float scale = s.scale * LOG2_E;  // the softmax is computed with powers of 2
        const int64_t first_span = low / SPAN * SPAN, last_span = divide_up(high, SPAN) * SPAN;
        for (int64_t t = first_span; t < last_span; t += SPAN) {
            Vector sum[R][2];
            clear<R, 2>(sum);
            add_words<R, P>(&q[r * k_words * STEP], k_words * STEP, &keys[t * k_words], SPAN, k_words, sum);
            UNROLL for (int i = 0; i < R; ++i)
                UNROLL for (int v = 0; v < 2; ++v) store(&scores[i][t + v * WIDTH], sum[i][v] * scale);
        }
        weigh(r, R, base, first_span, last_span);
        const int64_t first = low / STEP, num = divide_up(high, STEP) - first;
        for (int64_t d = 0; d < v_width; d += SPAN) {
            Vector sum[R][2];
            UNROLL for (int i = 0; i < R; ++i)
                UNROLL for (int v = 0; v < 2; ++v) sum[i][v] = load(&acc[(r + i) * v_width + d + v * WIDTH]);
            add_words<R, P>(weights[0] + first * STEP, CHUNK, &values[first * v_width + d], v_width, num, sum);
            UNROLL for (int i = 0; i < R; ++i)
                UNROLL for (int v = 0; v < 2; ++v) store(&acc[(r + i) * v_width + d + v * WIDTH], sum[i][v]);
        }
    }

    // The tokens of a chunk that a row sees: the first and the one after the last, relative to the chunk's base.
    std::pair<int64_t, int64_t> seen(int64_t row, int64_t base) const {
        const int64_t position = first_position + row / group;
        const int64_t high = std::clamp<int64_t>(position + 1 - base, 0, CHUNK);
        return {s.window > 0 ? std::clamp<int64_t>(position - s.window + 1 - base, 0, high) : 0, high};
    }

    // Softcap, mask and softmax update of `num` rows: turns their scores of tokens `first` .. `end` - 1, whole spans, into weights.
    // One copy of the code for all numbers of rows, so that the compiler cannot make them round differently.
    __attribute__((noinline)) void weigh(int64_t r, int64_t num, int64_t base, int64_t first, int64_t end) {
        alignas(64) float highest[MAX_ROWS + WIDTH], shrink[MAX_ROWS + WIDTH];
        for (int64_t i = 0; i < num; ++i) {
            float* row = scores[i];
            const auto [low, high] = seen(r + i, base);
            const float cap = s.softcap * LOG2_E;
            if (s.softcap > 0)
                for (int64_t t = low; t < high; ++t) row[t] = cap * std::tanh(row[t] / cap);
            std::fill(row + first, row + low, MINUS_INFINITY);
            std::fill(row + high, row + end, MINUS_INFINITY);
            Vector most = Vector{} + row_max[r + i];
            for (int64_t t = first; t < end; t += WIDTH) most = larger(most, load(row + t));
            highest[i] = largest(most);
        }
        for (int64_t i = 0; i < num; i += WIDTH) store(shrink + i, exp2_nonpositive(load(&row_max[r + i]) - load(highest + i)));
        for (int64_t i = 0; i < num; ++i) {
            row_max[r + i] = highest[i];
            Vector sum = load(&row_sum[(r + i) * WIDTH]) * shrink[i];
            for (int64_t t = first; t < end; t += WIDTH)
                sum += store_rounded(&weights[i][t], exp2_nonpositive(load(&scores[i][t]) - highest[i]));
            store(&row_sum[(r + i) * WIDTH], sum);
            if (shrink[i] == 1.0f) continue;
            for (int64_t d = 0; d < v_width; ++d) acc[(r + i) * v_width + d] *= shrink[i];
        }
    }

    void save(Q* out, int64_t first_token, int64_t kv_head) const {
        for (int64_t r = 0; r < num_rows; ++r) {
            Q* to = out + ((first_token + r / group) * s.num_heads + kv_head * group + r % group) * s.v_dim;
            float total = 0;
            for (int i = 0; i < WIDTH; ++i) total += row_sum[r * WIDTH + i];
            const float share = 1.0f / total;
            for (int64_t d = 0; d < s.v_dim; ++d) store(to + d, acc[r * v_width + d] * share);
        }
    }
};

struct Work {
    int64_t request, kv_head, first_token, num_tokens;
};

template <typename Q, typename KV>
void attend(const Q* query, const KV* k_cache, const KV* v_cache, Q* out, const int32_t* tables, int64_t table_stride,
            const int32_t* query_starts, const int32_t* context_lens, int64_t num_requests, const Shape& s, Team& team) {
    const int64_t tile_tokens = std::max<int64_t>(1, QUERY_ROWS / (s.num_heads / s.num_kv_heads));
    const int64_t k_size = s.k_dim * s.block_size, v_size = s.v_dim * s.block_size;
    std::vector<Work> work;
    for (int64_t r = 0; r < num_requests; ++r)
        for (int64_t t = query_starts[r]; t < query_starts[r + 1]; t += tile_tokens)
            for (int64_t h = 0; h < s.num_kv_heads; ++h)
                work.push_back({r, h, t, std::min<int64_t>(tile_tokens, query_starts[r + 1] - t)});
    const int64_t num_work = static_cast<int64_t>(work.size());
    std::vector<std::unique_ptr<Tile<Q, KV>>> tiles(team.size());  // by member
    team.each(num_work, 1, 1, [&](const Piece& piece) {
        auto& tile = tiles[piece.member];
        if (!tile) tile = std::make_unique<Tile<Q, KV>>(s, tile_tokens * (s.num_heads / s.num_kv_heads));
        const int64_t i = num_work - 1 - piece.first;  // last first: a prompt's late tiles take longest, its short ones balance the threads
        const Work &w = work[i], &next = work[std::max<int64_t>(i - 1, 0)];
        const int64_t first_position = context_lens[w.request] - query_starts[w.request + 1] + w.first_token;
        tile->load_queries(query, w.first_token, w.num_tokens, w.kv_head);
        tile->attend(k_cache + w.kv_head * k_size, s.num_kv_heads * k_size, v_cache + w.kv_head * v_size, s.num_kv_heads * v_size,
                     tables + w.request * table_stride, first_position,
                     {k_cache + next.kv_head * k_size, tables + next.request * table_stride,
                      divide_up(context_lens[next.request], s.block_size)});
        tile->save(out, w.first_token, w.kv_head);
    });
}

template <typename Q, typename KV>
void write(const Q* key, const Q* value, KV* k_cache, KV* v_cache, const int64_t* slots, int64_t num_tokens, const Shape& s,
           int64_t k_token_stride, int64_t k_head_stride, int64_t v_token_stride, int64_t v_head_stride, Team& team) {
    team.each(num_tokens, FEW_WRITES, [&](int64_t t, int) {
        const int64_t block = slots[t] / s.block_size, offset = slots[t] % s.block_size;
        for (int64_t h = 0; h < s.num_kv_heads; ++h) {
            KV* k_to = k_cache + (block * s.num_kv_heads + h) * s.k_dim * s.block_size + offset;
            const Q* k_from = key + t * k_token_stride + h * k_head_stride;
            for (int64_t d = 0; d < s.k_dim; ++d) store(k_to + d * s.block_size, to_float(k_from[d]));
            KV* v_to = v_cache + ((block * s.num_kv_heads + h) * s.block_size + offset) * s.v_dim;
            const Q* v_from = value + t * v_token_stride + h * v_head_stride;
            for (int64_t d = 0; d < s.v_dim; ++d) store(v_to + d, to_float(v_from[d]));
        }
    });
}

}  // namespace manta
