"""The measured rate of handoffs: tokens over seconds, with the weight that each handoff's size gives it."""

from __future__ import annotations

import pytest

from replicas.handoff.transfer_rate import TransferRate


def test_no_handoff_no_rate() -> None:
    rate = TransferRate()
    rate.add(0, 0.0)  # everything was cached
    assert rate.tokens_per_s is None


def test_first_handoff_is_the_rate() -> None:
    rate = TransferRate()
    rate.add(800, 0.1)
    assert rate.tokens_per_s == pytest.approx(8000)


def test_small_handoff_counts_by_its_size_and_a_lasting_change_takes_over() -> None:
    rate = TransferRate()
    rate.add(1000, 0.1)
    rate.add(16, 0.016)  # a tenth of the rate, for what one message costs
    assert rate.tokens_per_s == pytest.approx((0.8 * 1000 + 0.2 * 16) / (0.8 * 0.1 + 0.2 * 0.016))
    assert rate.tokens_per_s > 9000
    for _ in range(40):
        rate.add(1000, 0.2)
    assert rate.tokens_per_s == pytest.approx(5000, rel=0.01)
