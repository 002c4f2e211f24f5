// C = A * B^T for few or many rows of A, float accumulation, B packed once.
//
// B [N, K] is packed in panels of 16 outputs, each [K / STEP, 16] words of 32 bits that hold STEP neighbouring k's of one output:
// one float, two bfloat16, four int8 or eight int4, the first in the lowest bits. Words are widened to float in registers. Every
// output is one sum over k in a fixed order, whatever the number of rows, so a row's result is the same to the bit alone or in a
// batch. Where the CPU has an instruction for pairs of bfloat16, words are not widened, and `prepare` rounds the activations to
// bfloat16 too.
//
// Quantized weights are w = unit * (scale * u + least): u unsigned, one unit for each output, scale and least integers for each output
// and GROUP k's, which follow the group's words. A word is masked, not shifted, before it becomes a float, so u comes out times a
// power of two, and `prepare` divides the activations by that power first: both are exact.
#pragma once

#include <vector>

#include "bfloat16_dot.h"
#include "vector.h"

namespace manta {

constexpr int PANEL = LANES;
constexpr int ROW_BLOCK = 96;  // rows, a multiple of MAX_ROWS
constexpr int GROUP = 32;      // k's of quantized weights that share a scale

// Element types: how many k's a word holds, and how the j-th of them becomes a float; how many k's of the activations lie in the
// 32 bits of a float.
struct Float32 {
    static constexpr int STEP = 1, PER_FLOAT = 1;
    static Vector widen(Words words, int) { return as_floats(words); }
};
struct BFloat16Widened {
    static constexpr int STEP = 2, PER_FLOAT = 1;
    static Vector widen(Words words, int j) { return as_floats(j == 0 ? words << 16 : words & 0xffff0000u); }
};
#ifdef MANTA_BF16_DOT
struct BFloat16Dot {
    static constexpr int STEP = 2, PER_FLOAT = 2;
    static void add(Vector& sum, const Words& pair, const Words& words) { add_dot(sum, pair, words); }
};
using BFloat16Element = BFloat16Dot;
#else
using BFloat16Element = BFloat16Widened;
#endif
template <int BITS>
struct Unsigned {
    static constexpr int STEP = 32 / BITS, PER_FLOAT = 1;
    static constexpr uint32_t MASK = (1u << BITS) - 1;
    // The last one cannot be masked only: it would come out negative.
    static Vector widen(Words words, int j) { return to_floats(j == STEP - 1 ? words >> (32 - BITS) : words & (MASK << (BITS * j))); }
    static constexpr float divisor(int64_t k) { return k % STEP == STEP - 1 ? 1.0f : static_cast<float>(1u << (BITS * (k % STEP))); }
};
using Int8 = Unsigned<8>;
using Int4 = Unsigned<4>;

template <typename E>
constexpr bool IS_QUANTIZED = E::STEP > 2;
template <typename E>
constexpr int NUMBER_WORDS = GROUP / E::STEP * PANEL;  // of one group of a panel: the numbers
template <typename E>
constexpr int GROUP_WORDS = NUMBER_WORDS<E> + PANEL;   // and with 16 scales and 16 leasts of 16 bits

template <typename E>
struct PackedWeight {
    const uint32_t* panels;
    const float* units;  // of quantized weights, [num_outputs rounded up to 16]
    int64_t num_outputs, num_k;

    int64_t num_panels() const { return (num_outputs + PANEL - 1) / PANEL; }
    int64_t stride() const { return num_panels() * PANEL; }  // of a row of outputs
    int64_t padded_k() const {
        constexpr int MULTIPLE = IS_QUANTIZED<E> ? GROUP : E::STEP;
        return (num_k + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
    }
    int64_t num_groups() const { return padded_k() / GROUP; }
    int64_t panel_words() const { return IS_QUANTIZED<E> ? num_groups() * GROUP_WORDS<E> : padded_k() / E::STEP * PANEL; }
    // Floats of a prepared row of activations: the numbers, then the sum of each group.
    int64_t prepared_stride() const { return padded_k() / E::PER_FLOAT + (IS_QUANTIZED<E> ? num_groups() : 0); }
    bool wants_preparation() const { return IS_QUANTIZED<E> || E::PER_FLOAT > 1 || padded_k() != num_k; }
};

// One row of activations as the tiles want it: padded with zeros; rounded to pairs of bfloat16, the first in the lowest bits; for
// quantized weights divided and summed.
template <typename E>
void prepare(const float* row, const PackedWeight<E>& b, float* to) {
    if constexpr (E::PER_FLOAT > 1) {
        BFloat16* numbers = reinterpret_cast<BFloat16*>(to);
#pragma omp simd
        for (int64_t k = 0; k < b.num_k; ++k) store(numbers + k, row[k]);
        std::fill(numbers + b.num_k, numbers + b.padded_k(), BFloat16{0});
        return;
    }
    std::memcpy(to, row, b.num_k * sizeof(float));
    std::fill(to + b.num_k, to + b.padded_k(), 0.0f);
    if constexpr (IS_QUANTIZED<E>) {
        float* sums = to + b.padded_k();
        for (int64_t g = 0; g < b.num_groups(); ++g) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = g * GROUP; k < (g + 1) * GROUP; ++k) sum += to[k];
            sums[g] = sum;
        }
        for (int64_t k = 0; k < b.padded_k(); k += E::STEP)
            UNROLL for (int j = 0; j < E::STEP; ++j) to[k + j] *= 1.0f / E::divisor(j);
    }
}

// sum[r][p] += R rows times P panels, over `num_k` k's. `panel_stride` words lie between panels of B. What lies `ahead` words
// further on is fetched meanwhile: the hardware's own prefetch stops at the end of each 4 KiB and has to start over.
template <int R, int P, typename E>
inline __attribute__((always_inline)) void add_products(const float* a, int64_t a_stride, const uint32_t* b, int64_t panel_stride,
                                                        int64_t num_k, int64_t ahead, Vector sum[R][P * NUM_VECTORS]) {
    constexpr int V = P * NUM_VECTORS;
    for (int64_t k = 0; k < num_k; k += E::STEP, b += PANEL) {
        Words words[V];
        UNROLL for (int p = 0; p < P; ++p) if (ahead > 0) __builtin_prefetch(b + p * panel_stride + ahead);
        UNROLL for (int v = 0; v < V; ++v)
            std::memcpy(&words[v], b + v / NUM_VECTORS * panel_stride + v % NUM_VECTORS * WIDTH, sizeof words[v]);
        if constexpr (E::PER_FLOAT > 1) {
            UNROLL for (int r = 0; r < R; ++r) {
                uint32_t a_rk;
                std::memcpy(&a_rk, a + r * a_stride + k / E::STEP, sizeof a_rk);
                const Words same = Words{} + a_rk;
                UNROLL for (int v = 0; v < V; ++v) E::add(sum[r][v], same, words[v]);
            }
        } else {
            UNROLL for (int j = 0; j < E::STEP; ++j) {
                Vector w[V];
                UNROLL for (int v = 0; v < V; ++v) w[v] = E::widen(words[v], j);
                UNROLL for (int r = 0; r < R; ++r) {
                    const float a_rk = a[r * a_stride + k + j];
                    UNROLL for (int v = 0; v < V; ++v) sum[r][v] += a_rk * w[v];
                }
            }
        }
    }
}

// Zeros in C that the compiler does not know either.
inline void clear(float* c, int64_t num_rows, int64_t c_stride, int64_t num) {
    for (int64_t r = 0; r < num_rows; ++r) std::fill(c + r * c_stride, c + r * c_stride + num, 0.0f);
    asm volatile("" ::: "memory");
}

// c = A * B for R rows and one panel; or c += that.
template <int R, typename E>
void multiply_tile(const float* a, int64_t a_stride, const uint32_t* b, int64_t num_k, float* c, int64_t c_stride, bool accumulate) {
    Vector sum[R][NUM_VECTORS];
    clear<R, NUM_VECTORS>(sum);
    if (accumulate)
        UNROLL for (int r = 0; r < R; ++r) load_lanes(c + r * c_stride, sum[r]);
    add_products<R, 1, E>(a, a_stride, b, 0, num_k, 0, sum);
    UNROLL for (int r = 0; r < R; ++r) store_lanes(sum[r], c + r * c_stride);
}

// c += the products of one group of quantized weights, scaled. `b` holds the group's numbers, `scales` what follows them.
template <int R, int P, typename E>
inline __attribute__((always_inline)) void multiply_group(const float* a, const float* group_sums, int64_t a_stride, const uint32_t* b,
                                                          const uint32_t* scales, int64_t panel_stride, float* c, int64_t c_stride,
                                                          int64_t ahead) {
    Vector sum[R][P * NUM_VECTORS];
    clear<R, P * NUM_VECTORS>(sum);
    add_products<R, P, E>(a, a_stride, b, panel_stride, GROUP, ahead, sum);
    UNROLL for (int p = 0; p < P; ++p) {
        Vector scale[NUM_VECTORS], least[NUM_VECTORS];
        const int16_t* of_panel = reinterpret_cast<const int16_t*>(scales + p * panel_stride);
        if (ahead > 0) __builtin_prefetch(scales + p * panel_stride + ahead);
        load_lanes(of_panel, scale);
        load_lanes(of_panel + PANEL, least);
        UNROLL for (int r = 0; r < R; ++r) {
            Vector total[NUM_VECTORS];
            load_lanes(c + r * c_stride + p * PANEL, total);
            UNROLL for (int i = 0; i < NUM_VECTORS; ++i) {
                total[i] += sum[r][p * NUM_VECTORS + i] * scale[i];
                total[i] += group_sums[r * a_stride] * least[i];
            }
            store_lanes(total, c + r * c_stride + p * PANEL);
        }
    }
}

// From sums in units to outputs.
template <typename E>
void finish(int64_t num_rows, const PackedWeight<E>& b, int64_t first_panel, int64_t end_panel, float* c) {
    if constexpr (IS_QUANTIZED<E>)
        for (int64_t r = 0; r < num_rows; ++r)
            for (int64_t i = first_panel * PANEL; i < end_panel * PANEL; ++i) c[r * b.stride() + i] *= b.units[i];
}

// R rows times P panels from `panel` on, straight from the packed weights. The last AHEAD words of each panel fetch the beginning of
// the panel that follows the P ones.
template <int R, int P, typename E>
void multiply_whole_k(const float* a, int64_t a_stride, const PackedWeight<E>& b, int64_t panel, float* c) {
    constexpr int64_t AHEAD = 512;  // words; a multiple of those of a group's numbers
    const int64_t stride = b.panel_words(), skip = AHEAD + (P - 1) * stride;
    const uint32_t* from = b.panels + panel * stride;
    float* to = c + panel * PANEL;
    if constexpr (IS_QUANTIZED<E>) {
        clear(to, R, b.stride(), P * PANEL);
        for (int64_t g = 0; g < b.num_groups(); ++g, from += GROUP_WORDS<E>)
            multiply_group<R, P, E>(a + g * GROUP, a + b.padded_k() + g, a_stride, from, from + NUMBER_WORDS<E>, stride, to, b.stride(),
                                    (g + 1) * GROUP_WORDS<E> + AHEAD <= stride ? AHEAD : skip);
    } else {
        Vector sum[R][P * NUM_VECTORS];
        clear<R, P * NUM_VECTORS>(sum);
        const int64_t num_k = std::max<int64_t>(0, b.padded_k() - AHEAD / PANEL * E::STEP);
        add_products<R, P, E>(a, a_stride, from, stride, num_k, AHEAD, sum);
        add_products<R, P, E>(a + num_k / E::PER_FLOAT, a_stride, from + num_k / E::STEP * PANEL, stride, b.padded_k() - num_k, skip, sum);
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int p = 0; p < P; ++p) store_lanes(&sum[r][p * NUM_VECTORS], to + r * b.stride() + p * PANEL);
    }
}

// Few rows: the weights stream from memory once, several panels at a time to keep enough sums in flight.
template <typename E>
void multiply_few(const float* a, int64_t a_stride, int64_t num_rows, const PackedWeight<E>& b, int64_t first_panel, int64_t end_panel,
                  float* c) {
    with_rows(num_rows, [&](auto rows) {
        constexpr int R = decltype(rows)::value;
        constexpr int P = NUM_SUMS / (R * NUM_VECTORS) < 4 ? NUM_SUMS / (R * NUM_VECTORS) : 4;
        int64_t p = first_panel;
        for (; p + P <= end_panel; p += P) multiply_whole_k<R, P>(a, a_stride, b, p, c);
        for (; p < end_panel; ++p) multiply_whole_k<R, 1>(a, a_stride, b, p, c);
    });
}

// Many rows: a block of a panel stays in the first-level cache while all rows go over it and the next block is fetched.
template <typename E>
void multiply_many(const float* a, int64_t a_stride, int64_t num_rows, const PackedWeight<E>& b, int64_t panel, float* c) {
    constexpr int64_t BLOCK_K = 128 * E::STEP, BLOCK_WORDS = IS_QUANTIZED<E> ? BLOCK_K / GROUP * GROUP_WORDS<E> : 128 * PANEL;
    const int64_t num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const uint32_t* from = b.panels + panel * b.panel_words();
    float* to = c + panel * PANEL;
    if constexpr (IS_QUANTIZED<E>) clear(to, num_rows, b.stride(), PANEL);
    for (int64_t k = 0; k < b.padded_k(); k += BLOCK_K, from += BLOCK_WORDS) {
        const int64_t num_k = std::min(BLOCK_K, b.padded_k() - k);
        const uint32_t* next = from + b.panel_words() * num_k / b.padded_k();
        for (int64_t t = 0; t < num_tiles; ++t) {
            const int64_t r = t * num_rows / num_tiles;
            for (int64_t i = t * BLOCK_WORDS / num_tiles / PANEL; i < (t + 1) * BLOCK_WORDS / num_tiles / PANEL; ++i)
                __builtin_prefetch(next + i * PANEL);
            with_rows((t + 1) * num_rows / num_tiles - r, [&](auto rows) {
                constexpr int R = decltype(rows)::value;
                const float* a_rk = a + r * a_stride + k / E::PER_FLOAT;
                float* c_r = to + r * b.stride();
                if constexpr (IS_QUANTIZED<E>) {
                    const float* group_sums = a + r * a_stride + b.padded_k() + k / GROUP;
                    for (int64_t g = 0; g < num_k / GROUP; ++g) {
                        const uint32_t* group = from + g * GROUP_WORDS<E>;
                        multiply_group<R, 1, E>(a_rk + g * GROUP, group_sums + g, a_stride, group, group + NUMBER_WORDS<E>, 0, c_r,
                                                b.stride(), 0);
                    }
                } else {
                    multiply_tile<R, E>(a_rk, a_stride, from, num_k, c_r, b.stride(), k > 0);
                }
            });
        }
    }
}

// c [num_rows, b.stride()] = a [num_rows, b.num_k] * b. The padding outputs are written too. `prepared` is scratch for
// num_rows * b.prepared_stride() floats where b.wants_preparation().
template <typename E>
void multiply(const float* a, int64_t num_rows, const PackedWeight<E>& b, float* c, float* prepared, int num_threads) {
    constexpr int64_t TOGETHER = 4;  // panels that are read side by side
    const int64_t num_groups = (b.num_panels() + TOGETHER - 1) / TOGETHER;
    // Handed out in some pieces for each thread: one that is held up costs little, and what was fetched ahead is mostly one's own.
    const int64_t piece = std::max<int64_t>(1, num_groups / (8 * num_threads));
    const float* rows = b.wants_preparation() ? prepared : a;
    const int64_t stride = b.wants_preparation() ? b.prepared_stride() : b.num_k;
#pragma omp parallel num_threads(num_threads)
    {
        if (b.wants_preparation()) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < num_rows; ++r) prepare(a + r * b.num_k, b, prepared + r * stride);
        }
#pragma omp for schedule(dynamic, piece)
        for (int64_t g = 0; g < num_groups; ++g) {
            const int64_t first = g * TOGETHER, end = std::min(first + TOGETHER, b.num_panels());
            // Blocks of rows whose inputs and outputs stay in the second-level cache for all of these panels.
            for (int64_t r = 0; r < num_rows; r += ROW_BLOCK) {
                const int64_t num = std::min<int64_t>(ROW_BLOCK, num_rows - r);
                const float* a_r = rows + r * stride;
                float* c_r = c + r * b.stride();
                if (num_rows <= MAX_ROWS)
                    multiply_few(a_r, stride, num, b, first, end, c_r);
                else
                    for (int64_t p = first; p < end; ++p) multiply_many(a_r, stride, num, b, p, c_r);
                finish(num, b, first, end, c_r);
            }
        }
    }
}

}  // namespace manta
