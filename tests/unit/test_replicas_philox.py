"""Philox4x32-10 against the known-answer vectors that its authors publish (Random123, tests/kat_vectors)."""

import numpy as np
import pytest

from replicas.sampling.philox import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_counter_gives_published_words(counter, key, expected):
    words = philox4x32(*(np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64) for text in (counter, key)))
    assert [f"{int(word):08x}" for word in words[:, 0]] == expected.split()


def test_uniforms_first_draw_of_seed_zero_is_the_published_words_as_a_double():
    """53 bits as (a >> 5, b >> 6), the construction of Matsumoto's genrand_res53."""
    a, b = 0x6627E8D5, 0xE169C58D
    assert uniforms([0], [0], [0])[0] == ((a >> 5) * 67108864 + (b >> 6)) / 9007199254740992


def test_uniforms_batch_equals_each_alone():
    seeds, choices, positions = [0, 1, -1, 2**63, 7], [0, 1, 2, 0, 3], [0, 5, 2**33, 1, 9]
    batch = uniforms(seeds, choices, positions)
    assert batch.tolist() == [uniforms([s], [c], [p])[0] for s, c, p in zip(seeds, choices, positions, strict=True)]
    assert len(set(batch.tolist())) == len(seeds)


def test_uniforms_differ_in_every_coordinate():
    draws = uniforms([1, 2, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1])
    assert len(set(draws.tolist())) == 4
    assert ((draws >= 0) & (draws < 1)).all()
