"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3").

A draw is a pure function of (seed, choice, position). Without generator state it is the same alone, in a batch, after a
preemption, after a resume on another replica, and in the verification of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_NUM_ROUNDS = 10

Words = npt.NDArray[np.uint64]


def philox4x32(counter_4N: Words, key_2N: Words) -> Words:
    """Four 32-bit words for each of N counters [4, N] and keys [2, N]; all words lie in the low half of uint64."""
    c0, c1, c2, c3 = counter_4N
    k0, k1 = key_2N
    for _ in range(_NUM_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per (seed, choice, position).

    Seeds are taken modulo 2**64, so negative ones are fine. The counter is (position, choice, 0): its last word is free for
    other uses of the same seed.
    """
    seed_N = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    position_N = np.array(positions, dtype=np.uint64)
    choice_N = np.array(choices, dtype=np.uint64) & _LOW
    counter_4N = np.stack([position_N & _LOW, position_N >> _32, choice_N, np.zeros_like(choice_N)])
    word0_N, word1_N, _, _ = philox4x32(counter_4N, np.stack([seed_N & _LOW, seed_N >> _32]))
    mantissa_N = (word0_N >> np.uint64(5)) * np.uint64(1 << 26) + (word1_N >> np.uint64(6))
    draw_N: npt.NDArray[np.float64] = mantissa_N.astype(np.float64) * 2.0**-53
    return draw_N
