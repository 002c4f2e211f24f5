// C = A * B^T for few or many rows of A. B is packed once and A is prepared for each product (packed_weight.h). Every output is one sum
// over k in a fixed order, whatever the number of rows, so a row's result is the same to the bit alone or in a batch.
#pragma once

#include "packed_weight.h"
#include "team.h"
#include "vector.h"

namespace manta {

constexpr int MAX_PANELS = 4;         // panels read side by side
constexpr int TILES_TOGETHER = 12;    // tiles that all use some panels before the next tiles do
constexpr int BLOCK_WORDS = 1 << 14;  // words of a panel that stay in the second-level cache, with as many prefetched ones
constexpr int64_t FEW_TOKENS = 4;     // so many are prepared, normalised and so on sooner than another thread would hear of them
constexpr int TILE_ROWS = MAX_ROWS < 8 ? MAX_ROWS : 8;  // rows that share each load of weights

// Panels that a tile of `rows` rows reads side by side: as many as there are registers for their sums.
constexpr int64_t panels_beside(int64_t rows) { return std::min<int64_t>(MAX_PANELS, NUM_SUMS / (rows * NUM_VECTORS)); }

// Rows in tiles of nearly equal size.
struct Tiles {
    int64_t num_rows, num = (num_rows + TILE_ROWS - 1) / TILE_ROWS;

    int64_t first(int64_t tile) const { return tile * num_rows / num; }
    int64_t size(int64_t tile) const { return first(tile + 1) - first(tile); }
    int64_t of(int64_t row) const { return ((row + 1) * num - 1) / num_rows; }
};

// Prefetching of weights by a tile for later ones. As `interval` tiles use the same weights, each fetches every `interval`-th line, at
// the place `words` later. So fetching overlaps with the multiplication; hardware prefetch stops at the end of each 4 KiB page.
struct Ahead {
    int64_t words, interval, wait;

    bool is_due() {
        if (wait-- > 0) return false;
        wait = interval - 1;
        return true;
    }
    // To the second-level cache: the first-level cache only has room for the current block.
    void fetch(const uint32_t* from) const { __builtin_prefetch(from + words, 0, 2); }
};

// The 32 bits at `from`, in every lane.
inline Words broadcast(const float* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return Words{} + word;
}

// sum[r][p] += R rows times P panels, over `num_k` k's from the start of a line. Panels of B are `panel_stride` words apart.
template <int R, int P, typename E>
inline __attribute__((always_inline)) void add_products(const float* a, const uint32_t* b, int64_t panel_stride, int64_t num_k,
                                                        Ahead& ahead, Vector sum[R][P * NUM_VECTORS]) {
    constexpr int V = P * NUM_VECTORS, FLOATS = E::STEP / E::PER_FLOAT;  // floats of a row that belong to a word
    for (int64_t left = num_k / E::PER_FLOAT; left > 0; left -= LINE, a += R * LINE) {
        for (int64_t i = 0; i < std::min<int64_t>(left, LINE); i += FLOATS, b += PANEL) {
            Words words[V];
            if (ahead.is_due())
                UNROLL for (int p = 0; p < P; ++p) ahead.fetch(b + p * panel_stride);
            UNROLL for (int v = 0; v < V; ++v)
                std::memcpy(&words[v], b + v / NUM_VECTORS * panel_stride + v % NUM_VECTORS * WIDTH, sizeof words[v]);
            if constexpr (E::PER_FLOAT > 1) {
                UNROLL for (int r = 0; r < R; ++r) {
                    const Words same = broadcast(a + r * LINE + i);
                    UNROLL for (int v = 0; v < V; ++v) add_dot(sum[r][v], same, words[v]);
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

// sum[r][p] = R rows times P panels over one group, in steps.
template <int R, int P, typename E>
inline __attribute__((always_inline)) void multiply_integers(const float* a, const uint32_t* b, int64_t panel_stride, Ahead& ahead,
                                                             Integers sum[R][P * NUM_VECTORS]) {
    constexpr int V = P * NUM_VECTORS, NUM = GROUP / E::STEP;  // words
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < V; ++v) sum[r][v] = Integers{};
    for (int half = 0; half < 2; ++half, a += LINE / 2) {  // the upper bytes of all activations, then the lower ones
        for (int i = 0; i < NUM; ++i) {
            const uint32_t* from = b + i * PANEL;
            Words words[V];
            if (i % 2 == 0 && ahead.is_due())  // each line in one of the two passes
                UNROLL for (int p = 0; p < P; ++p) ahead.fetch(b + (half * NUM + i) / 2 * PANEL + p * panel_stride);
            UNROLL for (int v = 0; v < V; ++v)
                std::memcpy(&words[v], from + v / NUM_VECTORS * panel_stride + v % NUM_VECTORS * WIDTH, sizeof words[v]);
            UNROLL for (int j = 0; j < E::NUM_BYTES; ++j) {
                Words bytes[V];
                UNROLL for (int v = 0; v < V; ++v) bytes[v] = E::bytes(words[v], j);
                UNROLL for (int r = 0; r < R; ++r) {
                    const Words same = broadcast(a + r * LINE + i * E::NUM_BYTES + j);
                    UNROLL for (int v = 0; v < V; ++v) add_dot(sum[r][v], bytes[v], same);
                }
            }
        }
        if (half == 0)
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int v = 0; v < V; ++v) sum[r][v] *= 256;
    }
}

// total += the products of one group of quantized weights, scaled.
template <int R, int P, typename E>
inline __attribute__((always_inline)) void multiply_group(const float* a, const float* group_sums, const uint32_t* b, int64_t panel_stride,
                                                          Ahead& ahead, Vector total[R][P * NUM_VECTORS]) {
    const uint32_t* scales = b + NUMBER_WORDS<E>;
    std::conditional_t<IS_INTEGER<E>, Integers, Vector> sum[R][P * NUM_VECTORS];
    if constexpr (IS_INTEGER<E>) {
        multiply_integers<R, P, E>(a, b, panel_stride, ahead, sum);
    } else {
        clear<R, P * NUM_VECTORS>(sum);
        add_products<R, P, E>(a, b, panel_stride, GROUP, ahead, sum);
    }
    UNROLL for (int p = 0; p < P; ++p) {
        Vector scale[NUM_VECTORS], least[NUM_VECTORS];
        ahead.fetch(scales + p * panel_stride);
        UNROLL for (int i = 0; i < NUM_VECTORS; ++i) {
            Integers both;
            std::memcpy(&both, scales + p * panel_stride + i * WIDTH, sizeof both);
            scale[i] = as_vector(both << 16 >> 16);
            least[i] = as_vector(both >> 16);
        }
        UNROLL for (int r = 0; r < R; ++r) {
            UNROLL for (int i = 0; i < NUM_VECTORS; ++i) {
                Vector& to = total[r][p * NUM_VECTORS + i];
                to += as_vector(sum[r][p * NUM_VECTORS + i]) * scale[i];
                to += group_sums[r * LINE] * least[i];
            }
        }
    }
}

// Scales the sums of a tile's rows and some panels by units and steps, which makes them outputs.
template <typename E>
void finish(const float* a, int64_t num_rows, const PackedWeight<E>& b, int64_t first_panel, int64_t end_panel, float* c) {
    const float* steps = a + b.step_line() * num_rows * LINE;
    for (int64_t r = 0; r < num_rows; ++r)
        for (int64_t i = first_panel * PANEL; i < end_panel * PANEL; ++i) c[r * b.stride() + i] *= b.units[i] * steps[r * LINE];
}

// A tile's R rows times P panels from `panel` on, over parts first .. end - 1 of these panels; c already has the sums of earlier parts.
template <int R, int P, typename E>
void multiply_tile(const float* a, const PackedWeight<E>& b, int64_t panel, int64_t first, int64_t end, Ahead ahead, float* c) {
    const uint32_t* from = b.panels + panel * b.panel_words() + first * PART_WORDS<E>;
    const float* a_k = a + first * PART_K<E> / E::PER_FLOAT * R;
    float* to = c + panel * PANEL;
    Vector sum[R][P * NUM_VECTORS];
    clear<R, P * NUM_VECTORS>(sum);
    if (first > 0)
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int p = 0; p < P; ++p) load_lanes(to + r * b.stride() + p * PANEL, &sum[r][p * NUM_VECTORS]);
    if constexpr (IS_QUANTIZED<E>) {
        const float* group_sums = a + b.number_lines() * R * LINE;
        for (int64_t g = first; g < end; ++g, a_k += GROUP / E::PER_FLOAT * R, from += GROUP_WORDS<E>)
            multiply_group<R, P, E>(a_k, group_sums + g / LINE * R * LINE + g % LINE, from, b.panel_words(), ahead, sum);
    } else {
        add_products<R, P, E>(a_k, from, b.panel_words(), (end - first) * E::STEP, ahead, sum);
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int p = 0; p < P; ++p) store_lanes(&sum[r][p * NUM_VECTORS], to + r * b.stride() + p * PANEL);
}

// Some tiles times P panels from `panel` on, in blocks of k that stay in the cache while the tiles use them and prefetch the next block.
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

// c [num_rows, b.stride()] = a [num_rows, b.num_k] * b. Padding outputs are written too. `prepared` is scratch memory for
// num_rows * b.prepared_floats() floats.
template <typename E>
void multiply(const float* a, int64_t num_rows, const PackedWeight<E>& b, float* c, float* prepared, Team& team) {
    const Tiles tiles{num_rows};
    const int64_t num_together = panels_beside((num_rows + tiles.num - 1) / tiles.num);
    // Blocks of tiles whose inputs and outputs stay in the second-level cache while panels are read.
    const int64_t num_blocks = (tiles.num + TILES_TOGETHER - 1) / TILES_TOGETHER;
    const auto multiply_block = [&](int64_t block, int64_t panel, int64_t num_panels) {
        const int64_t first = block * tiles.num / num_blocks, end = (block + 1) * tiles.num / num_blocks;
        with_rows<MAX_PANELS>(num_panels, [&](auto panels) {
            multiply_panels<decltype(panels)::value>(prepared, tiles, first, end, b, panel, c);
        });
        if constexpr (IS_QUANTIZED<E>)
            for (int64_t t = first; t < end; ++t)
                finish(prepared + tiles.first(t) * b.prepared_floats(), tiles.size(t), b, panel, panel + num_panels,
                       c + tiles.first(t) * b.stride());
    };
    team.each(num_rows, FEW_TOKENS, [&](int64_t r, int) {
        const int64_t tile = tiles.of(r), first = tiles.first(tile);
        prepare(a + r * b.num_k, b, prepared + first * b.prepared_floats() + (r - first) * LINE, tiles.size(tile) * LINE);
    });
    // Each thread's own share are neighbouring panels, so that it mostly prefetches its own.
    team.each(b.num_panels(), num_together, num_blocks, [&](const Piece& piece) { multiply_block(piece.pass, piece.first, piece.num); });
}

}  // namespace manta
