// sums + u0 * s0 + u1 * s1 + u2 * s2 + u3 * s3 over words of four bytes, u unsigned and s signed, as the instruction VPDPBUSD computes
// it (Intel's manual, volume 2). Integer sums are exact in any order.
//
// The version in plain C++ lets tests run the tiles on a CPU without the instruction.
#pragma once

#include "vector.h"

#if defined(MANTA_EMULATE)

#define MANTA_INTEGER_DOT

namespace manta {

__attribute__((noinline)) inline void add_dot(Integers& sums, const Words& unsigned_bytes, const Words& signed_bytes) {
    for (int i = 0; i < WIDTH; ++i)
        for (int byte = 0; byte < 32; byte += 8)
            sums[i] += static_cast<uint8_t>(unsigned_bytes[i] >> byte) * static_cast<int8_t>(signed_bytes[i] >> byte);
}

}  // namespace manta

#elif defined(__AVX512VNNI__)

#define MANTA_INTEGER_DOT

#include <immintrin.h>

namespace manta {

inline void add_dot(Integers& sums, const Words& unsigned_bytes, const Words& signed_bytes) {
    __m512i to, u, s;
    std::memcpy(&to, &sums, sizeof to);
    std::memcpy(&u, &unsigned_bytes, sizeof u);
    std::memcpy(&s, &signed_bytes, sizeof s);
    to = _mm512_dpbusd_epi32(to, u, s);
    std::memcpy(&sums, &to, sizeof to);
}

}  // namespace manta

#endif
