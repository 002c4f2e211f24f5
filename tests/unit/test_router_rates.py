from __future__ import annotations

import pytest

from replicas.stats import ReplicaStats
from router.fleet.rates import DrainRate, PoolRates, RateModel, Rates

PRIOR = Rates(prefill_tokens_per_s=4_000.0, decode_step_s=0.03)


def test_rates_nothing_measured_is_the_prior() -> None:
    assert RateModel(PRIOR).rates("r0") == PRIOR


def test_rates_first_measurements_are_averaged_and_later_ones_smoothed() -> None:
    model = RateModel(PRIOR, prefill_weight=0.25)
    model.observe("r0", ReplicaStats(prefill_tokens_per_s=1_000.0))
    assert model.rates("r0") == Rates(prefill_tokens_per_s=1_000.0, decode_step_s=0.03)
    model.observe("r0", ReplicaStats(prefill_tokens_per_s=2_000.0, decode_step_s=0.01))
    assert model.rates("r0") == Rates(prefill_tokens_per_s=1_500.0, decode_step_s=0.01)
    for measured in (1_000.0, 1_500.0, 1_000.0, 2_250.0):
        model.observe("r0", ReplicaStats(prefill_tokens_per_s=measured))
    # thirds, then quarters: (1000 + 2000 + 1000) / 3 = 1333.3, 1375, 1281.25, 1523.4
    assert model.rates("r0").prefill_tokens_per_s == pytest.approx(1_523.4375)
    for absent in (None, 0.0, float("nan"), float("inf")):
        model.observe("r0", ReplicaStats(prefill_tokens_per_s=absent))
    assert model.rates("r0").prefill_tokens_per_s == pytest.approx(1_523.4375)


def test_urgent_rate_is_none_until_measured_and_then_also_that_of_new_replicas() -> None:
    model = RateModel(PRIOR)
    model.observe("r0", ReplicaStats(prefill_tokens_per_s=1_000.0))
    assert model.rates("r0").urgent_tokens_per_s is None
    model.observe("r0", ReplicaStats(urgent_tokens_per_s=1_600.0))
    assert model.rates("r0").urgent_tokens_per_s == model.rates("new").urgent_tokens_per_s == 1_600.0
    model.forget("r0")
    assert model.rates("new").urgent_tokens_per_s is None


def test_rates_repeated_report_of_an_idle_replica_teaches_nothing() -> None:
    model = RateModel(PRIOR)
    for measured in (1_000.0, 3_000.0, 3_000.0, 3_000.0):
        model.observe("r0", ReplicaStats(prefill_tokens_per_s=measured))
    assert model.rates("r0").prefill_tokens_per_s == 2_000.0


def test_rates_new_replica_is_taken_for_the_median_of_its_peers() -> None:
    model = RateModel(PRIOR)
    for name, rate in (("a", 1_000.0), ("b", 9_000.0), ("c", 2_000.0)):
        model.observe(name, ReplicaStats(prefill_tokens_per_s=rate))
    assert model.rates("new").prefill_tokens_per_s == 2_000.0
    model.forget("c")
    assert model.rates("new").prefill_tokens_per_s == 5_000.0


def test_drain_rate_counts_only_backlogged_time() -> None:
    drain = DrainRate(window_s=1.0)
    assert drain.tokens_per_s(otherwise=123.0) == 123.0
    drain.observe(0.0, 50, is_backlogged=False)
    drain.observe(10.0, 50, is_backlogged=True)  # the backlog starts here
    drain.observe(10.5, 300, is_backlogged=True)
    drain.observe(11.0, 200, is_backlogged=True)
    assert drain.tokens_per_s(otherwise=123.0) == pytest.approx(500.0)
    drain.observe(12.0, 100, is_backlogged=False)
    assert drain.tokens_per_s(otherwise=123.0) == pytest.approx(500.0 + 0.3 * (100.0 - 500.0))


def test_pool_rates_decode_replicas_are_as_fast_as_the_prefill_pool_unless_measured_to_be_faster() -> None:
    rates = PoolRates(PRIOR)
    rates.observe("d", "decode", ReplicaStats(prefill_tokens_per_s=300.0, decode_step_s=0.02, transfer_tokens_per_s=9e5))
    assert rates.rates("d", "decode") == Rates(prefill_tokens_per_s=300.0, decode_step_s=0.02, transfer_tokens_per_s=9e5)
    rates.observe("p", "prefill", ReplicaStats(prefill_tokens_per_s=8_000.0))
    assert rates.rates("d", "decode").prefill_tokens_per_s == 8_000.0
    rates.observe("fast", "decode", ReplicaStats(prefill_tokens_per_s=9_000.0))
    assert rates.rates("fast", "decode").prefill_tokens_per_s == 9_000.0


def test_pool_rates_what_a_pool_has_not_measured_is_taken_from_the_other() -> None:
    rates = PoolRates(PRIOR)
    rates.observe("d", "decode", ReplicaStats(decode_step_s=0.02))
    rates.observe("p", "prefill", ReplicaStats(prefill_tokens_per_s=8_000.0))
    assert rates.rates("p", "prefill").decode_step_s == 0.02
    assert rates.rates("new", "decode").prefill_tokens_per_s == 8_000.0
    assert rates.rates("new", "unified") == PRIOR, "a unified replica is of neither"
    assert rates.typical_prefill_tokens_per_s("prefill") == 8_000.0
    rates.forget("p")
    assert rates.rates("p", "prefill").prefill_tokens_per_s == PRIOR.prefill_tokens_per_s
