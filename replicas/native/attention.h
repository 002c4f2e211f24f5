// Attention over paged KV on a CPU: plain C++ that the compiler vectorises, called through a C interface.
//
// Layouts ("hdt-htd"): K is [block, kv_head, dim, token], so that the scores of neighbouring tokens lie in one vector;
// V is [block, kv_head, token, dim]. Queries are [token, head, dim] with free strides, outputs are packed.
// Slots that no token of the request was written to are never used, so stale content, NaN included, cannot leak. What a row
// gets does not depend on the rows computed beside it: whole, chunked, batched or alone, it is the same to the bit.
// The softmax is computed online over chunks of tokens (Milakov & Gimelshein, arXiv 1805.02867; FlashAttention,
// arXiv 2205.14135). The plain reference beside it is replicas/attention/reference.py.

#pragma once

#include <vector>

#include "vector.h"

namespace manta {

constexpr int CHUNK = 128;  // tokens between two updates of the running softmax
constexpr int STRIDE = CHUNK + LANES;  // of a row of scores; whole vectors are stored past the last token

struct Shape {
    int64_t num_heads, num_kv_heads, k_dim, v_dim, block_size;
    int64_t q_token_stride, q_head_stride;
    float scale, softcap;  // softcap 0 means none
    int64_t window;        // 0 means none; else a row at position p sees p - window + 1 .. p
};

// scores[row][0..num) for `rows` query rows against tokens first .. first + num - 1 of one block. Whole vectors are computed
// wherever the block has room, so that a token's score does not depend on how many tokens follow it.
template <int rows, typename T>
void score_tokens(const float* q, const T* k_block, const Shape& s, int64_t first, int64_t num, float* scores) {
    int64_t t = 0;
    for (; t < num && first + t + LANES <= s.block_size; t += LANES) {
        Vector sum[rows][NUM_VECTORS];
        clear<rows, NUM_VECTORS>(sum);
        for (int64_t d = 0; d < s.k_dim; ++d) {
            Vector k[NUM_VECTORS];
            load_lanes(k_block + d * s.block_size + first + t, k);
            UNROLL for (int r = 0; r < rows; ++r)
                UNROLL for (int i = 0; i < NUM_VECTORS; ++i) sum[r][i] += q[r * s.k_dim + d] * k[i];
        }
        UNROLL for (int r = 0; r < rows; ++r) store_lanes(sum[r], &scores[r * STRIDE + t]);
    }
    for (; t < num; ++t)
        for (int r = 0; r < rows; ++r) {
            float sum = 0;
            for (int64_t d = 0; d < s.k_dim; ++d) sum += q[r * s.k_dim + d] * to_float(k_block[d * s.block_size + first + t]);
            scores[r * STRIDE + t] = sum;
        }
}

// acc[row][:] += weights[row][t] * V[t][:] for tokens first .. first + num - 1 of one block.
template <int rows, typename T>
void add_values(const float* weights, const T* v_block, const Shape& s, int64_t first, int64_t num, float* acc) {
    int64_t d = 0;
    for (; d + LANES <= s.v_dim; d += LANES) {
        Vector sum[rows][NUM_VECTORS];
        UNROLL for (int r = 0; r < rows; ++r) load_lanes(&acc[r * s.v_dim + d], sum[r]);
        for (int64_t t = 0; t < num; ++t) {
            Vector v[NUM_VECTORS];
            load_lanes(v_block + (first + t) * s.v_dim + d, v);
            UNROLL for (int r = 0; r < rows; ++r)
                UNROLL for (int i = 0; i < NUM_VECTORS; ++i) sum[r][i] += weights[r * STRIDE + t] * v[i];
        }
        UNROLL for (int r = 0; r < rows; ++r) store_lanes(sum[r], &acc[r * s.v_dim + d]);
    }
    for (; d < s.v_dim; ++d)
        for (int64_t t = 0; t < num; ++t)
            for (int r = 0; r < rows; ++r) acc[r * s.v_dim + d] += weights[r * STRIDE + t] * to_float(v_block[(first + t) * s.v_dim + d]);
}

// One tile: consecutive query tokens of one request times the query heads of one kv head.
template <typename Q, typename KV>
struct Tile {
    const Shape& s;
    int64_t group, num_tokens, num_rows;
    std::vector<float> q, acc, scores, row_max, row_sum, widened;

    Tile(const Shape& shape, int64_t max_tokens)
        : s(shape), group(shape.num_heads / shape.num_kv_heads), num_tokens(0), num_rows(0) {
        const size_t rows = static_cast<size_t>(max_tokens * group);
        q.resize(rows * s.k_dim);
        acc.resize(rows * s.v_dim);
        scores.resize(rows * STRIDE);
        row_max.resize(rows);
        row_sum.resize(rows);
        widened.resize(s.block_size * std::max(s.k_dim, s.v_dim));
    }

    // Row r is query token r / group, query head kv_head * group + r % group. Scaled queries are kept as float.
    void load(const Q* query, int64_t first_token, int64_t tokens, int64_t kv_head) {
        num_tokens = tokens;
        num_rows = tokens * group;
        for (int64_t r = 0; r < num_rows; ++r) {
            const Q* from = query + (first_token + r / group) * s.q_token_stride + (kv_head * group + r % group) * s.q_head_stride;
            for (int64_t d = 0; d < s.k_dim; ++d) q[r * s.k_dim + d] = to_float(from[d]) * s.scale;
        }
        std::fill(acc.begin(), acc.end(), 0.0f);
        std::fill(row_max.begin(), row_max.end(), MINUS_INFINITY);
        std::fill(row_sum.begin(), row_sum.end(), 0.0f);
    }

    // Calls back with the first row and the number of rows of each group that shares its loads.
    template <typename F>
    void for_row_groups(F&& call) const {
        const int64_t num_groups = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t g = 0; g < num_groups; ++g) {
            const int64_t r = g * num_rows / num_groups;
            with_rows((g + 1) * num_rows / num_groups - r, [&](auto rows) { call(r, rows); });
        }
    }

    // Calls back with a block of K or V: as it is for one group of rows, else widened once for all of them. `num_runs` runs of
    // `count` elements are used, from `first` on, `stride` apart.
    template <typename F>
    void with_block(const KV* block, int64_t first, int64_t count, int64_t num_runs, int64_t stride, F&& call) {
        if constexpr (std::is_same_v<KV, float>) return call(block);
        if (num_rows <= MAX_ROWS) return call(block);
        for (int64_t run = 0; run < num_runs; ++run) {
            const KV* from = block + run * stride + first;
            float* to = &widened[run * stride + first];
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
        }
        call(static_cast<const float*>(widened.data()));
    }

    // Softcap, mask and softmax update for tokens base .. base + num - 1 of the sequence.
    void weigh(int64_t base, int64_t num, int64_t first_position) {
        for (int64_t r = 0; r < num_rows; ++r) {
            float* row = &scores[r * STRIDE];
            const int64_t position = first_position + r / group;
            const int64_t low = s.window > 0 ? std::clamp<int64_t>(position - s.window + 1 - base, 0, num) : 0;
            const int64_t high = std::clamp<int64_t>(position + 1 - base, low, num);
            if (s.softcap > 0)
                for (int64_t t = low; t < high; ++t) row[t] = s.softcap * std::tanh(row[t] / s.softcap);
            float highest = row_max[r];
#pragma omp simd reduction(max : highest)
            for (int64_t t = low; t < high; ++t) highest = std::max(highest, row[t]);
            std::fill(row, row + low, 0.0f);
            std::fill(row + high, row + num, 0.0f);
            if (low == high) continue;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t t = low; t < high; ++t) {
                row[t] = exp_nonpositive(row[t] - highest);
                sum += row[t];
            }
            const float shrink = row_max[r] == MINUS_INFINITY ? 0.0f : exp_nonpositive(row_max[r] - highest);
            row_sum[r] = row_sum[r] * shrink + sum;
            row_max[r] = highest;
            if (shrink != 1.0f)
                for (int64_t d = 0; d < s.v_dim; ++d) acc[r * s.v_dim + d] *= shrink;
        }
    }

    void attend(const KV* k_cache, const KV* v_cache, const int32_t* table, int64_t first_position, int64_t kv_head) {
        const int64_t end = first_position + num_tokens;
        const int64_t low = s.window > 0 ? std::max<int64_t>(first_position - s.window + 1, 0) : 0;
        for (int64_t base = low / CHUNK * CHUNK; base < end; base += CHUNK) {
            const int64_t begin = std::max(base, low / s.block_size * s.block_size);
            const int64_t chunk_end = std::min<int64_t>(base + CHUNK, end);
            over_blocks(begin, chunk_end, [&](int64_t token, int64_t block, int64_t first, int64_t count) {
                const KV* k_block = k_cache + (table[block] * s.num_kv_heads + kv_head) * s.k_dim * s.block_size;
                // Whole vectors are read wherever the block has room, so whole vectors are widened too.
                const int64_t room = std::min((count + LANES - 1) / LANES * LANES, s.block_size - first);
                with_block(k_block, first, room, s.k_dim, s.block_size, [&](const auto* keys) {
                    for_row_groups([&](int64_t r, auto rows) {
                        float* to = &scores[r * STRIDE + token - base];
                        score_tokens<decltype(rows)::value>(&q[r * s.k_dim], keys, s, first, count, to);
                    });
                });
            });
            weigh(base, chunk_end - base, first_position);
            over_blocks(begin, chunk_end, [&](int64_t token, int64_t block, int64_t first, int64_t count) {
                const KV* v_block = v_cache + (table[block] * s.num_kv_heads + kv_head) * s.v_dim * s.block_size;
                with_block(v_block, first * s.v_dim, count * s.v_dim, 1, 0, [&](const auto* values) {
                    for_row_groups([&](int64_t r, auto rows) {
                        const float* weights = &scores[r * STRIDE + token - base];
                        add_values<decltype(rows)::value>(weights, values, s, first, count, &acc[r * s.v_dim]);
                    });
                });
            });
        }
    }

    // Calls back for each piece of tokens begin .. end - 1 of the sequence that lies within one block.
    template <typename F>
    void over_blocks(int64_t begin, int64_t end, F&& call) {
        for (int64_t t = begin; t < end;) {
            const int64_t first = t % s.block_size;
            const int64_t count = std::min(s.block_size - first, end - t);
            call(t, t / s.block_size, first, count);
            t += count;
        }
    }

    void save(Q* out, int64_t first_token, int64_t kv_head) const {
        for (int64_t r = 0; r < num_rows; ++r) {
            Q* to = out + ((first_token + r / group) * s.num_heads + kv_head * group + r % group) * s.v_dim;
            const float share = 1.0f / row_sum[r];
            for (int64_t d = 0; d < s.v_dim; ++d) store(to + d, acc[r * s.v_dim + d] * share);
        }
    }
};

struct Work {
    int64_t request, kv_head, first_token, num_tokens;
};

template <typename Q, typename KV>
void attend(const Q* query, const KV* k_cache, const KV* v_cache, Q* out, const int32_t* tables, int64_t table_stride,
            const int32_t* query_starts, const int32_t* context_lens, int64_t num_requests, const Shape& s, int num_threads) {
    const int64_t tile_tokens = std::max<int64_t>(1, 32 / (s.num_heads / s.num_kv_heads));
    std::vector<Work> work;
    for (int64_t r = 0; r < num_requests; ++r)
        for (int64_t t = query_starts[r]; t < query_starts[r + 1]; t += tile_tokens)
            for (int64_t h = 0; h < s.num_kv_heads; ++h)
                work.push_back({r, h, t, std::min<int64_t>(tile_tokens, query_starts[r + 1] - t)});
    const int64_t num_work = static_cast<int64_t>(work.size());
#pragma omp parallel num_threads(num_threads)
    {
        Tile<Q, KV> tile(s, tile_tokens);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_work; ++i) {
            const Work& w = work[i];
            const int64_t first_position = context_lens[w.request] - query_starts[w.request + 1] + w.first_token;
            tile.load(query, w.first_token, w.num_tokens, w.kv_head);
            tile.attend(k_cache, v_cache, tables + w.request * table_stride, first_position, w.kv_head);
            tile.save(out, w.first_token, w.kv_head);
        }
    }
}

template <typename Q, typename KV>
void write(const Q* key, const Q* value, KV* k_cache, KV* v_cache, const int64_t* slots, int64_t num_tokens, const Shape& s,
           int64_t k_token_stride, int64_t k_head_stride, int64_t v_token_stride, int64_t v_head_stride, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_tokens > 16)
    for (int64_t t = 0; t < num_tokens; ++t) {
        const int64_t block = slots[t] / s.block_size, offset = slots[t] % s.block_size;
        for (int64_t h = 0; h < s.num_kv_heads; ++h) {
            KV* k_to = k_cache + (block * s.num_kv_heads + h) * s.k_dim * s.block_size + offset;
            const Q* k_from = key + t * k_token_stride + h * k_head_stride;
            for (int64_t d = 0; d < s.k_dim; ++d) store(k_to + d * s.block_size, to_float(k_from[d]));
            KV* v_to = v_cache + ((block * s.num_kv_heads + h) * s.block_size + offset) * s.v_dim;
            const Q* v_from = value + t * v_token_stride + h * v_head_stride;
            for (int64_t d = 0; d < s.v_dim; ++d) store(v_to + d, to_float(v_from[d]));
        }
    }
}

}  // namespace manta
