// Numbers and vectors that the kernels share: bfloat16, vectors of floats, exponentials.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace manta {

struct BFloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline void store(float* to, float x) { *to = x; }
inline void store(BFloat16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    // Round to nearest even; a NaN keeps a set mantissa bit.
    to->bits = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float rounded(float x) {  // to bfloat16
    BFloat16 half;
    store(&half, x);
    return to_float(half);
}
inline BFloat16 upper_half(float x) {  // x must be rounded to bfloat16 already
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return {static_cast<uint16_t>(bits >> 16)};
}

// e^x for x <= 0 within 2 units in the last place; below -87 it is 0. Branch-free, so that loops over it vectorise.
inline float exp_nonpositive(float x) {
    const float clamped = std::max(x, -87.0f);
    const float n = std::nearbyint(clamped * 1.44269504f);
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const float e = p * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? 0.0f : e * scale;
}

#if defined(__AVX512F__) || defined(MANTA_EMULATE)
constexpr int WIDTH = 16;  // floats in a register
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(WIDTH * sizeof(uint32_t))));
typedef int32_t Integers __attribute__((vector_size(WIDTH * sizeof(int32_t))));

inline Vector load(const float* from) {
    Vector numbers;
    std::memcpy(&numbers, from, sizeof numbers);
    return numbers;
}
inline void store(float* to, const Vector& numbers) { std::memcpy(to, &numbers, sizeof numbers); }
inline Vector as_floats(Words words) {  // the same bits
    Vector floats;
    std::memcpy(&floats, &words, sizeof words);
    return floats;
}
inline Vector as_vector(const Vector& floats) { return floats; }  // the same numbers
inline Vector as_vector(const Integers& integers) { return __builtin_convertvector(integers, Vector); }
inline Vector as_vector(const Words& words) { return as_vector(__builtin_convertvector(words, Integers)); }  // below 2^31

// Loops over registers must be unrolled completely, or the compiler keeps the array in memory.
#define UNROLL _Pragma("GCC unroll 16")

inline Words as_words(const Vector& floats) {
    Words words;
    std::memcpy(&words, &floats, sizeof floats);
    return words;
}

// Stores numbers, rounded to nearest and ties away from zero, and returns the stored values.
inline Vector store_rounded(float* to, const Vector& numbers) {
    store(to, numbers);
    return numbers;
}
inline Vector store_rounded(BFloat16* to, const Vector& numbers) {
    typedef uint16_t Half __attribute__((vector_size(WIDTH * sizeof(uint16_t))));
    const Words rounded = as_words(numbers) + 0x8000u;
    const Half half = __builtin_convertvector(rounded >> 16, Half);
    std::memcpy(to, &half, sizeof half);
    return as_floats(rounded & 0xffff0000u);
}

inline Vector larger(const Vector& a, const Vector& b) { return a > b ? a : b; }
inline float largest(const Vector& numbers) {
    float lanes[WIDTH];
    store(lanes, numbers);
    UNROLL for (int half = WIDTH / 2; half > 0; half /= 2)
        UNROLL for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 0 within 4 units in the last place; below -126.5 it is 0.
inline Vector exp2_nonpositive(const Vector& x) {
    const Vector least = Vector{} - 127.0f, clamped = x < least ? least : x;
    constexpr float TO_INTEGER = 0x1.8p23f + 127;  // adding it rounds to an integer; the low bits are then a biased exponent
    const Vector shifted = clamped + TO_INTEGER, f = clamped - (shifted - TO_INTEGER);
    Vector p = f * 1.327647129e-3f + 9.675540961e-3f;
    p = p * f + 5.550713092e-2f;
    p = p * f + 2.402212024e-1f;
    p = p * f + 6.931469440e-1f;
    p = p * f + 1.0f;
    return p * as_floats(as_words(shifted) << 23);
}

constexpr int LANES = 16;  // tokens whose scores, or dims whose sums, are computed together
constexpr int NUM_VECTORS = LANES / WIDTH;

inline void load_lanes(const float* from, Vector to[NUM_VECTORS]) {
    UNROLL for (int i = 0; i < NUM_VECTORS; ++i) std::memcpy(&to[i], from + i * WIDTH, sizeof to[i]);
}
inline void store_lanes(const Vector from[NUM_VECTORS], float* to) {
    UNROLL for (int i = 0; i < NUM_VECTORS; ++i) std::memcpy(to + i * WIDTH, &from[i], sizeof from[i]);
}

constexpr int NUM_SUMS = WIDTH == 16 ? 24 : 12;  // registers that hold sums
constexpr int MAX_ROWS = NUM_SUMS / NUM_VECTORS < 12 ? NUM_SUMS / NUM_VECTORS : 12;  // rows that share each load of LANES numbers

// Sums start from a zero that the compiler cannot see. Otherwise it could fuse the first two products in either order, and choose
// differently for different numbers of rows.
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
// Calls `call` with `value` as a compile-time constant in 1 .. MOST.
template <int MOST = MAX_ROWS, int R = 1, typename F>
void with_rows(int64_t value, F&& call) {
    if constexpr (R < MOST) {
        if (value > R) return with_rows<MOST, R + 1>(value, call);
    }
    call(std::integral_constant<int, R>());
}

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

}  // namespace manta
