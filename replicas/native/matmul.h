// C = A * B^T for few or many rows of A, float accumulation, B packed once.
//
// B [N, K] is packed in panels of 16 outputs, each [K / STEP, 16] words of 32 bits that hold STEP neighbouring k's of one output:
// one float, two bfloat16, four int8 or eight int4, the first in the lowest bits. Words are widened to float in registers. Every
// output is one sum over k in a fixed order, whatever the number of rows, so a row's result is the same to the bit alone or in a
// batch.
//
// Quantized weights are unsigned numbers u. A word is masked, not shifted, before it becomes a float, so u comes out times a power of
// two, and `prepare` divides the activations by that power first: both are exact.
//   int8: w = unit * (u - 128), one unit for each output.
//   int4: w = unit * (scale * u + least), scale and least integers for each output and GROUP k's; they follow the group's words.
#pragma once

#include <vector>

#include "vector.h"

namespace manta {

constexpr int PANEL = LANES;
constexpr int NUM_SUMS = WIDTH == 16 ? 24 : 12;               // registers that hold sums
constexpr int MAX_ROWS = NUM_SUMS / NUM_VECTORS < 12 ? NUM_SUMS / NUM_VECTORS : 12;  // rows of a tile with one panel
constexpr int K_BLOCK = 256;  // k's whose panel, as floats, stays in the first-level cache
constexpr int GROUP = 32;     // k's of int4 weights that share a scale
constexpr int GROUP_WORDS = GROUP / 8 * PANEL + PANEL;  // of one panel: the numbers, then 16 scales and 16 leasts of 16 bits

// Element types: how many k's a word holds, and how the j-th of them becomes a float. FACTOR(j) is what it comes out multiplied by.
struct Float32 {
    static constexpr int STEP = 1;
    static Vector widen(Words words, int) { return as_floats(words); }
};
struct BFloat16Pair {
    static constexpr int STEP = 2;
    static Vector widen(Words words, int j) { return as_floats(j == 0 ? words << 16 : words & 0xffff0000u); }
};
template <int BITS>
struct Unsigned {
    static constexpr int STEP = 32 / BITS;
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
struct PackedWeight {
    const uint32_t* panels;
    const float* units;  // of quantized weights, [num_outputs rounded up to 16]
    int64_t num_outputs, num_k;

    int64_t num_panels() const { return (num_outputs + PANEL - 1) / PANEL; }
    int64_t stride() const { return num_panels() * PANEL; }  // of a row of outputs
    int64_t padded_k() const {
        constexpr int MULTIPLE = E::STEP == 8 ? GROUP : E::STEP;
        return (num_k + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
    }
    int64_t num_groups() const { return padded_k() / GROUP; }
    int64_t panel_words() const { return E::STEP == 8 ? num_groups() * GROUP_WORDS : padded_k() / E::STEP * PANEL; }
    // Floats of a prepared row of activations: the numbers, then the sums of each group (int4) or of all (int8).
    int64_t prepared_stride() const { return padded_k() + (E::STEP == 8 ? num_groups() : E::STEP == 4 ? 1 : 0); }
    bool wants_preparation() const { return IS_QUANTIZED<E> || padded_k() != num_k; }
};

// One row of activations as the tiles want it: padded with zeros, and for quantized weights divided and summed.
template <typename E>
void prepare(const float* row, const PackedWeight<E>& b, float* to) {
    std::memcpy(to, row, b.num_k * sizeof(float));
    std::fill(to + b.num_k, to + b.padded_k(), 0.0f);
    if constexpr (IS_QUANTIZED<E>) {
        float* sums = to + b.padded_k();
        const int64_t size = E::STEP == 8 ? GROUP : b.padded_k();
        for (int64_t first = 0; first < b.padded_k(); first += size) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = first; k < first + size; ++k) sum += to[k];
            sums[first / size] = E::STEP == 8 ? sum : sum * 128.0f;
        }
        for (int64_t k = 0; k < b.padded_k(); k += E::STEP)
            UNROLL for (int j = 0; j < E::STEP; ++j) to[k + j] *= 1.0f / E::divisor(j);
    }
}

// sum[r][p] += R rows times P panels, over `num_k` k's. `panel_stride` words lie between panels of B.
template <int R, int P, typename E>
inline __attribute__((always_inline)) void add_products(const float* a, int64_t a_stride, const uint32_t* b, int64_t panel_stride,
                                                        int64_t num_k, Vector sum[R][P * NUM_VECTORS]) {
    constexpr int V = P * NUM_VECTORS;
    for (int64_t k = 0; k < num_k; k += E::STEP, b += PANEL) {
        Words words[V];
        UNROLL for (int v = 0; v < V; ++v)
            std::memcpy(&words[v], b + v / NUM_VECTORS * panel_stride + v % NUM_VECTORS * WIDTH, sizeof words[v]);
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

// Sums start from zeros that the compiler does not know to be zeros. It would otherwise be free to fuse the first two products in
// either order, and choose differently for other numbers of rows.
inline Vector unknown_zero() {
    Vector zero = {};
    asm("" : "+m"(zero));
    return zero;
}
template <int R, int V>
inline void clear(Vector sum[R][V]) {
    const Vector zero = unknown_zero();
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < V; ++v) sum[r][v] = zero;
}
inline void clear(float* c, int64_t num_rows, int64_t c_stride, int64_t num) {
    for (int64_t r = 0; r < num_rows; ++r) std::fill(c + r * c_stride, c + r * c_stride + num, 0.0f);
    asm volatile("" ::: "memory");
}

// c = A * B for R rows and P panels; or c += that.
template <int R, int P, typename E>
void multiply_tile(const float* a, int64_t a_stride, const uint32_t* b, int64_t panel_stride, int64_t num_k, float* c, int64_t c_stride,
                   bool accumulate) {
    Vector sum[R][P * NUM_VECTORS];
    clear<R, P * NUM_VECTORS>(sum);
    if (accumulate)
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int p = 0; p < P; ++p) load_lanes(c + r * c_stride + p * PANEL, &sum[r][p * NUM_VECTORS]);
    add_products<R, P, E>(a, a_stride, b, panel_stride, num_k, sum);
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int p = 0; p < P; ++p) store_lanes(&sum[r][p * NUM_VECTORS], c + r * c_stride + p * PANEL);
}

// c += the products of one group of int4 weights, scaled. `b` holds the group's numbers as E, `scales` what follows them.
template <int R, int P, typename E>
void multiply_group(const float* a, const float* group_sums, int64_t a_stride, const uint32_t* b, const uint32_t* scales,
                    int64_t panel_stride, float* c, int64_t c_stride) {
    Vector sum[R][P * NUM_VECTORS];
    clear<R, P * NUM_VECTORS>(sum);
    add_products<R, P, E>(a, a_stride, b, panel_stride, GROUP, sum);
    UNROLL for (int p = 0; p < P; ++p) {
        Vector scale[NUM_VECTORS], least[NUM_VECTORS];
        const int16_t* of_panel = reinterpret_cast<const int16_t*>(scales + p * panel_stride);
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

// From sums of u to outputs: for int8 less the 128 of every k, then times the units.
template <typename E>
void finish(const float* a, int64_t num_rows, const PackedWeight<E>& b, int64_t first_panel, int64_t end_panel, float* c) {
    if constexpr (IS_QUANTIZED<E>)
        for (int64_t r = 0; r < num_rows; ++r) {
            const float offset = E::STEP == 4 ? a[r * b.prepared_stride() + b.padded_k()] : 0.0f;
            float* to = c + r * b.stride();
            for (int64_t i = first_panel * PANEL; i < end_panel * PANEL; ++i) to[i] = (to[i] - offset) * b.units[i];
        }
}

// Calls `call` with `value` as a compile-time constant in 1 .. MAX_ROWS.
template <int R = 1, typename F>
void with_rows(int64_t value, F&& call) {
    if constexpr (R < MAX_ROWS) {
        if (value > R) return with_rows<R + 1>(value, call);
    }
    call(std::integral_constant<int, R>());
}

// R rows times P panels from `panel` on, straight from the packed weights.
template <int R, int P, typename E>
void multiply_whole_k(const float* a, int64_t a_stride, const PackedWeight<E>& b, int64_t panel, float* c) {
    const int64_t stride = b.panel_words();
    const uint32_t* from = b.panels + panel * stride;
    float* to = c + panel * PANEL;
    if constexpr (E::STEP == 8) {
        clear(to, R, b.stride(), P * PANEL);
        for (int64_t g = 0; g < b.num_groups(); ++g, from += GROUP_WORDS)
            multiply_group<R, P, E>(a + g * GROUP, a + b.padded_k() + g, a_stride, from, from + GROUP / 8 * PANEL, stride, to, b.stride());
    } else {
        multiply_tile<R, P, E>(a, a_stride, from, stride, b.padded_k(), to, b.stride(), false);
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

// Words [num_k / STEP, 16] as floats [num_k, 16].
template <typename E>
const uint32_t* as_floats(const uint32_t* words, int64_t num_k, float* scratch) {
    if constexpr (E::STEP == 1) return words;
    for (int64_t k = 0; k < num_k; k += E::STEP, words += PANEL)
        UNROLL for (int i = 0; i < NUM_VECTORS; ++i) {
            Words one;
            std::memcpy(&one, words + i * WIDTH, sizeof one);
            UNROLL for (int j = 0; j < E::STEP; ++j) {
                const Vector wide = E::widen(one, j);
                std::memcpy(scratch + (k + j) * PANEL + i * WIDTH, &wide, sizeof wide);
            }
        }
    return reinterpret_cast<const uint32_t*>(scratch);
}

// Many rows: each block of a panel is widened once and used for all of them. Rows are shared out evenly over the tiles.
template <typename E>
void multiply_many(const float* a, int64_t a_stride, int64_t num_rows, const PackedWeight<E>& b, int64_t panel, float* c, float* scratch) {
    const int64_t num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const uint32_t* from = b.panels + panel * b.panel_words();
    float* to = c + panel * PANEL;
    if constexpr (E::STEP == 8) clear(to, num_rows, b.stride(), PANEL);
    for (int64_t k = 0; k < b.padded_k(); k += K_BLOCK) {
        const int64_t num_k = std::min<int64_t>(K_BLOCK, b.padded_k() - k);
        const uint32_t* floats = nullptr;
        if constexpr (E::STEP == 8)
            for (int64_t g = 0; g < num_k / GROUP; ++g)
                floats = as_floats<E>(from + (k / GROUP + g) * GROUP_WORDS, GROUP, scratch + g * GROUP * PANEL) - g * GROUP * PANEL;
        else
            floats = as_floats<E>(from + k / E::STEP * PANEL, num_k, scratch);
        for (int64_t t = 0; t < num_tiles; ++t) {
            const int64_t r = t * num_rows / num_tiles;
            with_rows((t + 1) * num_rows / num_tiles - r, [&](auto rows) {
                constexpr int R = decltype(rows)::value;
                const float* a_rk = a + r * a_stride + k;
                float* c_r = to + r * b.stride();
                if constexpr (E::STEP == 8)
                    for (int64_t g = 0; g < num_k / GROUP; ++g) {
                        const int64_t group = k / GROUP + g;
                        multiply_group<R, 1, Float32>(a_rk + g * GROUP, a + r * a_stride + b.padded_k() + group, a_stride,
                                                      floats + g * GROUP * PANEL, from + group * GROUP_WORDS + GROUP / 8 * PANEL, 0, c_r,
                                                      b.stride());
                    }
                else
                    multiply_tile<R, 1, Float32>(a_rk, a_stride, floats, 0, num_k, c_r, b.stride(), k > 0);
            });
        }
    }
}

// c [num_rows, b.stride()] = a [num_rows, b.num_k] * b. The padding outputs are written too. `prepared` is scratch for
// num_rows * b.prepared_stride() floats where b.wants_preparation().
template <typename E>
void multiply(const float* a, int64_t num_rows, const PackedWeight<E>& b, float* c, float* prepared, int num_threads) {
    constexpr int64_t GROUP_OF_PANELS = 4;  // handed out together, so that a thread that is held up costs little
    const int64_t num_groups = (b.num_panels() + GROUP_OF_PANELS - 1) / GROUP_OF_PANELS;
    const float* rows = b.wants_preparation() ? prepared : a;
    const int64_t stride = b.wants_preparation() ? b.prepared_stride() : b.num_k;
#pragma omp parallel num_threads(num_threads)
    {
        if (b.wants_preparation()) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < num_rows; ++r) prepare(a + r * b.num_k, b, prepared + r * stride);
        }
        alignas(64) float scratch[K_BLOCK * PANEL];
#pragma omp for schedule(dynamic)
        for (int64_t g = 0; g < num_groups; ++g) {
            const int64_t first = g * GROUP_OF_PANELS, end = std::min(first + GROUP_OF_PANELS, b.num_panels());
            if (num_rows <= MAX_ROWS)
                multiply_few(rows, stride, num_rows, b, first, end, c);
            else
                for (int64_t p = first; p < end; ++p) multiply_many(rows, stride, num_rows, b, p, c, scratch);
            finish(rows, num_rows, b, first, end, c);
        }
    }
}

}  // namespace manta
