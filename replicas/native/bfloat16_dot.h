// sum + a1 * w1 + a0 * w0 over pairs of bfloat16, as the instruction VDPBF16PS computes it (Intel's manual, volume 2): two fused
// multiply-adds in float, the upper pair first, each rounded to nearest even; denormal inputs and results count as zeros, whatever
// the thread's settings are.
//
// The version in plain C++ lets tests run the tiles on a CPU without the instruction. It may differ in signs of zeros and bits of NaNs.
#pragma once

#include "vector.h"

#if defined(MANTA_EMULATE)

#define MANTA_BF16_DOT

namespace manta {

inline float without_denormal(float x) { return std::abs(x) < std::numeric_limits<float>::min() ? 0.0f : x; }

inline float fused(float a, float b, float c) {
    a = without_denormal(a), b = without_denormal(b), c = without_denormal(c);
    // Whether a result is denormal is decided after rounding to 24 bits. In double the product is exact, and so is the sum near the bound.
    constexpr double LEAST = std::numeric_limits<float>::min() * (1 - 0x1p-25);
    if (std::abs(static_cast<double>(a) * b + c) < LEAST) return 0.0f;
    return std::fma(a, b, c);
}

// Not inlined: thousands of copies would take minutes to compile.
__attribute__((noinline)) inline void add_dot(Vector& sum, const Words& a, const Words& w) {
    const Words upper_a = a & 0xffff0000u, upper_w = w & 0xffff0000u, lower_a = a << 16, lower_w = w << 16;
    const Vector a1 = as_floats(upper_a), w1 = as_floats(upper_w), a0 = as_floats(lower_a), w0 = as_floats(lower_w);
    for (int i = 0; i < WIDTH; ++i) sum[i] = fused(a0[i], w0[i], fused(a1[i], w1[i], sum[i]));
}

}  // namespace manta

#elif defined(__AVX512BF16__)

#define MANTA_BF16_DOT

#include <immintrin.h>

namespace manta {

inline void add_dot(Vector& sum, const Words& a, const Words& w) {
    __m512bh pairs, others;
    std::memcpy(&pairs, &a, sizeof pairs);
    std::memcpy(&others, &w, sizeof others);
    sum = _mm512_dpbf16_ps(sum, others, pairs);
}

}  // namespace manta

#endif
