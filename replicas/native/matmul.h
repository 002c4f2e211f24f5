// C = A * B^T for few or many rows of A, float accumulation, B packed once.
//
// B [N, K] is packed in panels of 16 outputs, [panel, k, 16], in float or bfloat16. Every output is one sum over k in
// ascending order, whatever the number of rows, so a row's result is the same to the bit alone or in a batch.
#pragma once

#include <vector>

#include "vector.h"

namespace manta {

constexpr int PANEL = LANES;
constexpr int NUM_SUMS = WIDTH == 16 ? 24 : 12;               // registers that hold sums
constexpr int MAX_ROWS = NUM_SUMS / NUM_VECTORS < 12 ? NUM_SUMS / NUM_VECTORS : 12;  // rows of a tile with one panel
constexpr int K_BLOCK = 256;  // k's whose panel, as floats, stays in the first-level cache

// R rows times P panels. `panel_stride` elements lie between panels of B.
template <int R, int P, typename T>
void multiply_tile(const float* a, int64_t a_stride, const T* b, int64_t panel_stride, int64_t num_k, float* c, int64_t c_stride,
                   bool accumulate) {
    constexpr int V = P * NUM_VECTORS;
    Vector sum[R][V] = {};
    if (accumulate)
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int p = 0; p < P; ++p) load_lanes(c + r * c_stride + p * PANEL, &sum[r][p * NUM_VECTORS]);
    for (int64_t k = 0; k < num_k; ++k) {
        Vector w[V];
        UNROLL for (int p = 0; p < P; ++p) load_lanes(b + p * panel_stride + k * PANEL, &w[p * NUM_VECTORS]);
        UNROLL for (int r = 0; r < R; ++r) {
            const float a_rk = a[r * a_stride + k];
            UNROLL for (int v = 0; v < V; ++v) sum[r][v] += a_rk * w[v];
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int p = 0; p < P; ++p) store_lanes(&sum[r][p * NUM_VECTORS], c + r * c_stride + p * PANEL);
}

// Calls `call` with `value` as a compile-time constant in 1 .. MAX_ROWS.
template <int R = 1, typename F>
void with_rows(int64_t value, F&& call) {
    if constexpr (R < MAX_ROWS) {
        if (value > R) return with_rows<R + 1>(value, call);
    }
    call(std::integral_constant<int, R>());
}

template <typename T>
struct PackedWeight {
    const T* panels;
    int64_t num_outputs, num_k;

    int64_t num_panels() const { return (num_outputs + PANEL - 1) / PANEL; }
    int64_t stride() const { return num_panels() * PANEL; }  // of a row of outputs
};

// Few rows: the weights stream from memory once, several panels at a time to keep enough sums in flight.
template <typename T>
void multiply_few(const float* a, int64_t num_rows, const PackedWeight<T>& b, int64_t first_panel, int64_t end_panel, float* c) {
    const int64_t panel_size = b.num_k * PANEL;
    with_rows(num_rows, [&](auto rows) {
        constexpr int R = decltype(rows)::value;
        constexpr int P = NUM_SUMS / (R * NUM_VECTORS) < 4 ? NUM_SUMS / (R * NUM_VECTORS) : 4;
        int64_t p = first_panel;
        for (; p + P <= end_panel; p += P)
            multiply_tile<R, P>(a, b.num_k, b.panels + p * panel_size, panel_size, b.num_k, c + p * PANEL, b.stride(), false);
        for (; p < end_panel; ++p)
            multiply_tile<R, 1>(a, b.num_k, b.panels + p * panel_size, panel_size, b.num_k, c + p * PANEL, b.stride(), false);
    });
}

inline const float* as_floats(const float* from, int64_t, float*) { return from; }
inline const float* as_floats(const BFloat16* from, int64_t num, float* scratch) {
    for (int64_t i = 0; i < num; i += LANES) {
        Vector lanes[NUM_VECTORS];
        load_lanes(from + i, lanes);
        store_lanes(lanes, scratch + i);
    }
    return scratch;
}

// Many rows: each block of a panel is widened once and used for all of them.
template <typename T>
void multiply_many(const float* a, int64_t num_rows, const PackedWeight<T>& b, int64_t panel, float* c, float* scratch) {
    for (int64_t k = 0; k < b.num_k; k += K_BLOCK) {
        const int64_t num_k = std::min<int64_t>(K_BLOCK, b.num_k - k);
        const float* block = as_floats(b.panels + (panel * b.num_k + k) * PANEL, num_k * PANEL, scratch);
        for (int64_t r = 0; r < num_rows; r += MAX_ROWS)
            with_rows(std::min<int64_t>(MAX_ROWS, num_rows - r), [&](auto rows) {
                multiply_tile<decltype(rows)::value, 1>(a + r * b.num_k + k, b.num_k, block, 0, num_k,
                                                        c + r * b.stride() + panel * PANEL, b.stride(), k > 0);
            });
    }
}

// c [num_rows, b.stride()] = a [num_rows, b.num_k] * b. The padding outputs are written too.
template <typename T>
void multiply(const float* a, int64_t num_rows, const PackedWeight<T>& b, float* c, int num_threads) {
    constexpr int64_t GROUP = 4;  // panels handed out together, so that a thread that is held up costs little
    const int64_t num_groups = (b.num_panels() + GROUP - 1) / GROUP;
#pragma omp parallel num_threads(num_threads)
    {
        alignas(64) float scratch[K_BLOCK * PANEL];
#pragma omp for schedule(dynamic)
        for (int64_t g = 0; g < num_groups; ++g) {
            const int64_t end = std::min((g + 1) * GROUP, b.num_panels());
            if (num_rows <= MAX_ROWS) {
                multiply_few(a, num_rows, b, g * GROUP, end, c);
            } else {
                for (int64_t p = g * GROUP; p < end; ++p) multiply_many(a, num_rows, b, p, c, scratch);
            }
        }
    }
}

}  // namespace manta
