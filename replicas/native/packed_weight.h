// The layout of weights [N, K] that the tiles of matmul.h read, and of the activations that they multiply.
//
// Weights are packed in panels of 16 outputs, each [K / STEP, 16] words of 32 bits that hold STEP neighbouring k's of one output: one
// float, two bfloat16, four int8 or eight int4. The first k is in the lowest bits; for int4 the first four are the lower halves of the
// four bytes. A tile reads the activations of its rows as one piece: `prepare` interleaves them, the first cache line of each row, then
// the second line of each row. In separate rows, lines a power of two apart would evict each other from the first-level cache.
//
// The multiplication depends on the CPU:
// - In general, words are widened to floats in registers, and activations are floats.
// - With an instruction for pairs of bfloat16, bfloat16 weights are multiplied directly, and `prepare` rounds activations to bfloat16.
// - With an instruction for bytes, quantized weights are multiplied as integers by activations of 16 bits: a row's largest number is
//   32639 steps, and each number is 256 times one signed byte plus another one, multiplied in two passes over the weights. This is
//   closer to float activations than bfloat16 is; 8 bits in one pass would lose more quality than int8 weights do.
//
// Quantized weights are w = unit * (scale * u + least): u unsigned, one unit per output, and integers scale and least per output and
// GROUP k's, which follow the group's words. Widening masks a word but does not shift it before it becomes a float, so the result is u
// times a power of two, and `prepare` divides the activations by that power first; both operations are exact.
#pragma once

#include "bfloat16_dot.h"
#include "integer_dot.h"
#include "vector.h"

namespace manta {

constexpr int PANEL = LANES;
constexpr int GROUP = 32;  // k's of quantized weights that share a scale
constexpr int LINE = 16;   // floats of a cache line

// Element types. STEP: k's in a word. PER_FLOAT: k's of the activations in the 32 bits of a float. widen: the j-th k of a word as a float.
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
};
using BFloat16Element = BFloat16Dot;
#else
using BFloat16Element = BFloat16Widened;
#endif

template <int BITS>
struct Unsigned {
    static constexpr int STEP = 32 / BITS, PER_FLOAT = 1;
    static constexpr uint32_t MASK = (1u << BITS) - 1;
    static constexpr int place(int j) { return j % 4 * 8 + j / 4 * BITS; }  // lowest bit of the j-th number
    // The last number must be shifted: masked only, it would become negative.
    static Vector widen(Words words, int j) { return as_vector(j == STEP - 1 ? words >> place(j) : words & (MASK << place(j))); }
    static constexpr float divisor(int64_t k) {
        const int j = k % STEP;
        return j == STEP - 1 ? 1.0f : static_cast<float>(1u << place(j));
    }
};
#ifdef MANTA_INTEGER_DOT
template <int BITS>
struct UnsignedDot {
    static constexpr int STEP = 32 / BITS, PER_FLOAT = 2;
    static constexpr int NUM_BYTES = STEP / 4;  // words of four bytes that a word expands to
    static constexpr uint32_t MASK = 0x01010101u * ((1u << BITS) - 1);
    static Words bytes(Words words, int j) { return BITS == 8 ? words : words >> (j * BITS) & MASK; }
};
using Int8 = UnsignedDot<8>;
using Int4 = UnsignedDot<4>;
#else
using Int8 = Unsigned<8>;
using Int4 = Unsigned<4>;
#endif

template <typename E>
constexpr bool IS_QUANTIZED = E::STEP > 2;
template <typename E>
constexpr bool IS_INTEGER = IS_QUANTIZED<E> && E::PER_FLOAT > 1;  // multiplied as integers
template <typename E>
constexpr int NUMBER_WORDS = GROUP / E::STEP * PANEL;  // words of numbers in one group of a panel
template <typename E>
constexpr int GROUP_WORDS = NUMBER_WORDS<E> + PANEL;   // plus a word per output: its scale in the lower half, its least in the upper one
// A part of a panel is one word per output, or a group when quantized.
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
    int64_t stride() const { return num_panels() * PANEL; }  // floats of a row of outputs
    int64_t padded_k() const {
        constexpr int MULTIPLE = IS_QUANTIZED<E> ? GROUP : E::STEP;
        return (num_k + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
    }
    int64_t num_groups() const { return padded_k() / GROUP; }
    int64_t panel_words() const { return IS_QUANTIZED<E> ? num_groups() * GROUP_WORDS<E> : padded_k() / E::STEP * PANEL; }
    // A prepared row of activations: lines of numbers; for quantized weights also lines with each group's sum and a line with the step.
    int64_t number_lines() const { return (padded_k() / E::PER_FLOAT + LINE - 1) / LINE; }
    int64_t step_line() const { return number_lines() + (num_groups() + LINE - 1) / LINE; }
    int64_t prepared_floats() const { return (IS_QUANTIZED<E> ? step_line() + 1 : number_lines()) * LINE; }
};

// `num` numbers of a row from k on: in place, or copied to `padded` with zeros after the row's end.
inline const float* numbers_of(const float* row, int64_t k, int64_t num_k, int64_t num, float* padded) {
    if (num_k - k >= num) return row + k;
    k = std::min(k, num_k);
    std::fill(std::copy(row + k, row + num_k, padded), padded + num, 0.0f);
    return padded;
}

// Prepares one row of activations for its tile, in lines that are `stride` floats apart: as floats or pairs of bfloat16; for quantized
// weights divided by powers of two, with group sums.
template <typename E>
void prepare_floats(const float* row, const PackedWeight<E>& b, float* to, int64_t stride) {
    constexpr int LINE_K = LINE * E::PER_FLOAT;
    float* sums = to + b.number_lines() * stride;
    if constexpr (IS_QUANTIZED<E>) to[b.step_line() * stride] = 1.0f;
    for (int64_t line = 0; line < b.number_lines(); ++line, to += stride) {
        const int64_t k = line * LINE_K;
        float padded[LINE_K], numbers[LINE_K];
        const float* from = numbers_of(row, k, b.num_k, LINE_K, padded);  // a group may end with a line that is all padding
        if constexpr (IS_QUANTIZED<E>) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < LINE_K; ++i) sum += from[i];
            float& of_group = sums[k / GROUP / LINE * stride + k / GROUP % LINE];
            of_group = k % GROUP == 0 ? sum : of_group + sum;
#pragma omp simd
            for (int i = 0; i < LINE_K; ++i) numbers[i] = from[i] * (1.0f / E::divisor(i));
        }
        if constexpr (E::PER_FLOAT > 1) {
            BFloat16* halves = reinterpret_cast<BFloat16*>(to);
            // Two loops: the compiler does not vectorise one that rounds and narrows.
#pragma omp simd
            for (int i = 0; i < LINE_K; ++i) numbers[i] = rounded(from[i]);
#pragma omp simd
            for (int i = 0; i < LINE_K; ++i) halves[i] = upper_half(numbers[i]);
        } else {
            std::copy_n(IS_QUANTIZED<E> ? numbers : from, LINE, to);
        }
    }
}

// Prepares one row as whole numbers of steps, the row's own, stored as signed bytes: the upper bytes of a group, then the lower ones.
template <typename E>
void prepare_integers(const float* row, const PackedWeight<E>& b, float* to, int64_t stride) {
    static_assert(LINE * E::PER_FLOAT == GROUP);
    constexpr float MOST_STEPS = 127 * 256 + 127, LEAST = 1e-30f;  // smaller rows have no finite inverse and count as zeros
    float most = 0, not_finite = 0;
#pragma omp simd reduction(max : most) reduction(+ : not_finite)
    for (int64_t k = 0; k < b.num_k; ++k) {
        most = std::max(most, std::abs(row[k]));
        not_finite += row[k] * 0.0f;
    }
    const float inverse = not_finite == 0 && most > LEAST ? MOST_STEPS / most : 0.0f;
    to[b.step_line() * stride] = most / MOST_STEPS + not_finite;
    float* sums = to + b.number_lines() * stride;
    for (int64_t g = 0; g < b.num_groups(); ++g, to += stride) {
        float padded[GROUP];
        const float* from = numbers_of(row, g * GROUP, b.num_k, GROUP, padded);
        int32_t steps[GROUP] = {}, sum = 0;
        if (inverse > 0) {  // numbers that are not finite have no integer
#pragma omp simd
            for (int i = 0; i < GROUP; ++i) steps[i] = static_cast<int32_t>(std::nearbyint(from[i] * inverse));
        }
        int8_t* bytes = reinterpret_cast<int8_t*>(to);
#pragma omp simd
        for (int i = 0; i < GROUP; ++i) bytes[i] = static_cast<int8_t>((steps[i] + 128) >> 8);
#pragma omp simd
        for (int i = 0; i < GROUP; ++i) bytes[GROUP + i] = static_cast<int8_t>(steps[i]);  // the lowest byte is the remainder
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < GROUP; ++i) sum += steps[i];
        sums[g / LINE * stride + g % LINE] = static_cast<float>(sum);
    }
}

template <typename E>
void prepare(const float* row, const PackedWeight<E>& b, float* to, int64_t stride) {
    if constexpr (IS_INTEGER<E>)
        prepare_integers(row, b, to, stride);
    else
        prepare_floats(row, b, to, stride);
}

}  // namespace manta
