// C = A * B^T for few or many rows of A, float accumulation, B packed once.
//
// B [N, K] is packed in panels of 16 outputs, each [K / STEP, 16] words of 32 bits that hold STEP neighbouring k's of one output:
// one float, two bfloat16, four int8 or eight int4, the even ones in the lower half, the first in the lowest bits. Words are widened to float in registers. Every
// output is one sum over k in a fixed order, whatever the number of rows, so a row's result is the same to the bit alone or in a
// batch. Where the CPU has an instruction for pairs of bfloat16, words become such pairs instead, and `prepare` rounds the activations
// to bfloat16 too. It lays the rows of a tile out line by line: one line of each, then the next ones. A tile so reads through its rows in
// one piece; in rows of their own, lines a power of two apart would not stay in the first-level cache together.
//
// Quantized weights are w = unit * (scale * u + least): u unsigned, one unit for each output, scale and least integers for each output
// and GROUP k's, which follow the group's words. A word is masked, not shifted, before it becomes a float, so u comes out times a
// power of two, and `prepare` divides the activations by that power first: both are exact. A float u of at most 8 bits has nothing in
// its lower half, so two of them make a pair of bfloat16 with a shift.
#pragma once

#include <vector>

#include "bfloat16_dot.h"
#include "vector.h"

namespace manta {

constexpr int PANEL = LANES;
constexpr int GROUP = 32;             // k's of quantized weights that share a scale
constexpr int MAX_PANELS = 4;         // that are read side by side
constexpr int TILES_TOGETHER = 12;    // that all go over some panels before others do
constexpr int BLOCK_WORDS = 1 << 14;  // of a panel, that stay in the second-level cache with as many that are fetched ahead
constexpr int LINE = 16;              // floats of a cache line
constexpr int TILE_ROWS = MAX_ROWS < 8 ? MAX_ROWS : 8;  // rows that share each load of weights

// Panels that a tile of so many rows takes: enough sums in flight, as many as there are registers for.
constexpr int64_t panels_beside(int64_t rows) { return std::min<int64_t>(MAX_PANELS, NUM_SUMS / (rows * NUM_VECTORS)); }

// Rows in tiles of nearly equal size.
struct Tiles {
    int64_t num_rows, num = (num_rows + TILE_ROWS - 1) / TILE_ROWS;

    int64_t first(int64_t tile) const { return tile * num_rows / num; }
    int64_t size(int64_t tile) const { return first(tile + 1) - first(tile); }
    int64_t of(int64_t row) const { return ((row + 1) * num - 1) / num_rows; }
};

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
    static Words pair(Words words, int) { return words; }
};
using BFloat16Element = BFloat16Dot;
constexpr int QUANTIZED_PER_FLOAT = 2;
#else
using BFloat16Element = BFloat16Widened;
constexpr int QUANTIZED_PER_FLOAT = 1;
#endif
template <int BITS>
struct Unsigned {
    static constexpr int STEP = 32 / BITS, PER_FLOAT = QUANTIZED_PER_FLOAT;
    static constexpr uint32_t MASK = (1u << BITS) - 1;
    static constexpr int place(int j) { return j % 2 * 16 + j / 2 * BITS; }  // of the j-th number, in bits from the lowest
    // The last one cannot be masked only: it would come out negative.
    static Vector widen(Words words, int j) { return to_floats(j == STEP - 1 ? words >> place(j) : words & (MASK << place(j))); }
    static constexpr float divisor(int64_t k) {
        const int j = k % STEP;
        return j == STEP - 1 || (PER_FLOAT > 1 && BITS == 4) ? 1.0f : static_cast<float>(1u << place(j));
    }
#ifdef MANTA_BF16_DOT
    // Numbers 2 j and 2 j + 1 as bfloat16, times their divisors.
    static Words pair(Words words, int j) {
        if constexpr (BITS == 4) return lowest_nibbles(words >> place(2 * j));
        return as_words(widen(words, 2 * j)) >> 16 | as_words(widen(words, 2 * j + 1));
    }
#endif
};
using Int8 = Unsigned<8>;
using Int4 = Unsigned<4>;

template <typename E>
constexpr bool IS_QUANTIZED = E::STEP > 2;
template <typename E>
constexpr int NUMBER_WORDS = GROUP / E::STEP * PANEL;  // of one group of a panel: the numbers
template <typename E>
constexpr int GROUP_WORDS = NUMBER_WORDS<E> + PANEL;   // and with 16 scales and 16 leasts of 16 bits
// A panel's parts: a word for each output, or a group.
template <typename E>
constexpr int PART_K = IS_QUANTIZED<E> ? GROUP : E::STEP;
template <typename E>
constexpr int PART_WORDS = IS_QUANTIZED<E> ? GROUP_WORDS<E> : PANEL;

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
    // Of a prepared row of activations: lines of numbers, then lines with the sum of each group.
    int64_t number_lines() const { return (padded_k() / E::PER_FLOAT + LINE - 1) / LINE; }
    int64_t prepared_floats() const { return (number_lines() + (IS_QUANTIZED<E> ? (num_groups() + LINE - 1) / LINE : 0)) * LINE; }
};

// One row of activations as its tile wants it, in lines that are `stride` floats apart: padded with zeros; rounded to pairs of
// bfloat16, the first in the lowest bits; for quantized weights divided and summed.
template <typename E>
void prepare(const float* row, const PackedWeight<E>& b, float* to, int64_t stride) {
    constexpr int LINE_K = LINE * E::PER_FLOAT;
    float* sums = to + b.number_lines() * stride;
    for (int64_t k = 0; k < b.num_k; k += LINE_K, to += stride) {
        float padded[LINE_K];
        const float* from = row + k;
        if (b.num_k - k < LINE_K) {
            std::fill(std::copy(from, row + b.num_k, padded), padded + LINE_K, 0.0f);
            from = padded;
        }
        float numbers[LINE_K];
        if constexpr (E::PER_FLOAT > 1) {
#pragma omp simd
            for (int i = 0; i < LINE_K; ++i) numbers[i] = rounded(from[i]);
        } else {
            std::copy_n(from, LINE_K, numbers);
        }
        if constexpr (IS_QUANTIZED<E>) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < LINE_K; ++i) sum += numbers[i];
            float& of_group = sums[k / GROUP / LINE * stride + k / GROUP % LINE];
            of_group = k % GROUP == 0 ? sum : of_group + sum;
#pragma omp simd
            for (int i = 0; i < LINE_K; ++i) numbers[i] *= 1.0f / E::divisor(i);
        }
        if constexpr (E::PER_FLOAT > 1) {
            BFloat16* halves = reinterpret_cast<BFloat16*>(to);
#pragma omp simd
            for (int i = 0; i < LINE_K; ++i) halves[i] = upper_half(numbers[i]);
        } else {
            std::copy_n(numbers, LINE, to);
        }
    }
    // A group's second line may be all padding.
    if constexpr (IS_QUANTIZED<E> && E::PER_FLOAT == 1)
        if (b.number_lines() * LINE - b.num_k >= LINE) std::fill_n(to, LINE, 0.0f);
}

// Weights that a tile fetches for those after it: what lies `words` further on, of every `interval`-th line, as `interval` tiles go
// over the same weights. Spread like this, fetching runs beside the multiplication; the hardware's own stops at the end of each 4 KiB.
struct Ahead {
    int64_t words, interval, wait;

    bool is_due() {
        if (wait-- > 0) return false;
        wait = interval - 1;
        return true;
    }
    // To the second-level cache: the first has room for the block that is at hand only.
    void fetch(const uint32_t* from) const { __builtin_prefetch(from + words, 0, 2); }
};

// sum[r][p] += R rows times P panels, over `num_k` k's from the start of a line. `panel_stride` words lie between panels of B.
template <int R, int P, typename E>
inline __attribute__((always_inline)) void add_products(const float* a, const uint32_t* b, int64_t panel_stride, int64_t num_k,
                                                        Ahead& ahead, Vector sum[R][P * NUM_VECTORS]) {
    constexpr int V = P * NUM_VECTORS, FLOATS = E::STEP / E::PER_FLOAT;  // of a row, that belong to a word
    for (int64_t left = num_k / E::PER_FLOAT; left > 0; left -= LINE, a += R * LINE) {
        for (int64_t i = 0; i < std::min<int64_t>(left, LINE); i += FLOATS, b += PANEL) {
            Words words[V];
            if (ahead.is_due())
                UNROLL for (int p = 0; p < P; ++p) ahead.fetch(b + p * panel_stride);
            UNROLL for (int v = 0; v < V; ++v)
                std::memcpy(&words[v], b + v / NUM_VECTORS * panel_stride + v % NUM_VECTORS * WIDTH, sizeof words[v]);
            if constexpr (E::PER_FLOAT > 1) {
                UNROLL for (int j = 0; j < FLOATS; ++j) {
                    Words pairs[V];
                    UNROLL for (int v = 0; v < V; ++v) pairs[v] = E::pair(words[v], j);
                    UNROLL for (int r = 0; r < R; ++r) {
                        uint32_t a_rk;
                        std::memcpy(&a_rk, a + r * LINE + i + j, sizeof a_rk);
                        const Words same = Words{} + a_rk;
                        UNROLL for (int v = 0; v < V; ++v) add_dot(sum[r][v], same, pairs[v]);
                    }
                }
            } else {
                UNROLL for (int j = 0; j < E::STEP; ++j) {
                    Vector w[V];
                    UNROLL for (int v = 0; v < V; ++v) w[v] = E::widen(words[v], j);
                    UNROLL for (int r = 0; r < R; ++r) {
                        const float a_rk = a[r * LINE + i + j];
                        UNROLL for (int v = 0; v < V; ++v) sum[r][v] += a_rk * w[v];
                    }
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

// c += the products of one group of quantized weights, scaled.
template <int R, int P, typename E>
inline __attribute__((always_inline)) void multiply_group(const float* a, const float* group_sums, const uint32_t* b, int64_t panel_stride,
                                                          Ahead& ahead, float* c, int64_t c_stride) {
    const uint32_t* scales = b + NUMBER_WORDS<E>;
    Vector sum[R][P * NUM_VECTORS];
    clear<R, P * NUM_VECTORS>(sum);
    add_products<R, P, E>(a, b, panel_stride, GROUP, ahead, sum);
    UNROLL for (int p = 0; p < P; ++p) {
        Vector scale[NUM_VECTORS], least[NUM_VECTORS];
        const int16_t* of_panel = reinterpret_cast<const int16_t*>(scales + p * panel_stride);
        ahead.fetch(scales + p * panel_stride);
        load_lanes(of_panel, scale);
        load_lanes(of_panel + PANEL, least);
        UNROLL for (int r = 0; r < R; ++r) {
            Vector total[NUM_VECTORS];
            load_lanes(c + r * c_stride + p * PANEL, total);
            UNROLL for (int i = 0; i < NUM_VECTORS; ++i) {
                total[i] += sum[r][p * NUM_VECTORS + i] * scale[i];
                total[i] += group_sums[r * LINE] * least[i];
            }
            store_lanes(total, c + r * c_stride + p * PANEL);
        }
    }
}

// From sums in units to outputs.
template <typename E>
void finish(int64_t first_row, int64_t end_row, const PackedWeight<E>& b, int64_t first_panel, int64_t end_panel, float* c) {
    if constexpr (IS_QUANTIZED<E>)
        for (int64_t r = first_row; r < end_row; ++r)
            for (int64_t i = first_panel * PANEL; i < end_panel * PANEL; ++i) c[r * b.stride() + i] *= b.units[i];
}

// A tile's R rows times P panels from `panel` on, over the parts first .. end - 1 of these panels; those before are in c already.
template <int R, int P, typename E>
void multiply_tile(const float* a, const PackedWeight<E>& b, int64_t panel, int64_t first, int64_t end, Ahead ahead, float* c) {
    const uint32_t* from = b.panels + panel * b.panel_words() + first * PART_WORDS<E>;
    const float* a_k = a + first * PART_K<E> / E::PER_FLOAT * R;
    float* to = c + panel * PANEL;
    if constexpr (IS_QUANTIZED<E>) {
        if (first == 0) clear(to, R, b.stride(), P * PANEL);
        const float* sums = a + b.number_lines() * R * LINE;
        for (int64_t g = first; g < end; ++g, a_k += GROUP / E::PER_FLOAT * R, from += GROUP_WORDS<E>)
            multiply_group<R, P, E>(a_k, sums + g / LINE * R * LINE + g % LINE, from, b.panel_words(), ahead, to, b.stride());
    } else {
        Vector sum[R][P * NUM_VECTORS];
        clear<R, P * NUM_VECTORS>(sum);
        if (first > 0)
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int p = 0; p < P; ++p) load_lanes(to + r * b.stride() + p * PANEL, &sum[r][p * NUM_VECTORS]);
        add_products<R, P, E>(a_k, from, b.panel_words(), (end - first) * E::STEP, ahead, sum);
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int p = 0; p < P; ++p) store_lanes(&sum[r][p * NUM_VECTORS], to + r * b.stride() + p * PANEL);
    }
}

// Some tiles times P panels from `panel` on, in blocks of k that stay in the cache while tiles go over them and fetch the next.
template <int P, typename E>
void multiply_panels(const float* a, const Tiles& tiles, int64_t first_tile, int64_t end_tile, const PackedWeight<E>& b, int64_t panel,
                     float* c) {
    constexpr int64_t LINE_PARTS = IS_QUANTIZED<E> ? 1 : LINE * E::PER_FLOAT / E::STEP;  // blocks are whole lines of activations
    const int64_t num_tiles = end_tile - first_tile, num_parts = b.panel_words() / PART_WORDS<E>;
    const int64_t num_blocks = (b.panel_words() + BLOCK_WORDS - 1) / BLOCK_WORDS;
    const auto start = [&](int64_t block) {
        return block < num_blocks ? block * num_parts / num_blocks / LINE_PARTS * LINE_PARTS : num_parts;
    };
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = start(block), end = start(block + 1);
        const int64_t ahead = (block + 1 < num_blocks ? end - first : P * num_parts - first) * PART_WORDS<E>;
        for (int64_t t = first_tile; t < end_tile; ++t) {
            with_rows<TILE_ROWS>(tiles.size(t), [&](auto rows) {
                constexpr int R = decltype(rows)::value;
                if constexpr (P <= panels_beside(R))
                    multiply_tile<R, P>(a + tiles.first(t) * b.prepared_floats(), b, panel, first, end,
                                        Ahead{ahead, num_tiles, t - first_tile}, c + tiles.first(t) * b.stride());
            });
        }
    }
}

// c [num_rows, b.stride()] = a [num_rows, b.num_k] * b. The padding outputs are written too. `prepared` is scratch for
// num_rows * b.prepared_floats() floats.
template <typename E>
void multiply(const float* a, int64_t num_rows, const PackedWeight<E>& b, float* c, float* prepared, int num_threads) {
    const Tiles tiles{num_rows};
    const int64_t num_together = panels_beside((num_rows + tiles.num - 1) / tiles.num);
    const int64_t num_blocks = (tiles.num + TILES_TOGETHER - 1) / TILES_TOGETHER;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < num_rows; ++r) {
            const int64_t tile = tiles.of(r), first = tiles.first(tile);
            prepare(a + r * b.num_k, b, prepared + first * b.prepared_floats() + (r - first) * LINE, tiles.size(tile) * LINE);
        }
        // One run of panels for each thread, so that what it fetches ahead is its own.
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_threads; ++i) {
            const int64_t end = (i + 1) * b.num_panels() / num_threads;
            for (int64_t p = i * b.num_panels() / num_threads; p < end; p += num_together) {
                const int64_t num = std::min(num_together, end - p);
                // Blocks of tiles whose inputs and outputs stay in the second-level cache for all of these panels.
                for (int64_t block = 0; block < num_blocks; ++block) {
                    const int64_t first = block * tiles.num / num_blocks, end_tile = (block + 1) * tiles.num / num_blocks;
                    with_rows<MAX_PANELS>(num, [&](auto panels) {
                        multiply_panels<decltype(panels)::value>(prepared, tiles, first, end_tile, b, p, c);
                    });
                    finish(tiles.first(first), tiles.first(end_tile), b, p, p + num, c);
                }
            }
        }
    }
}

}  // namespace manta
