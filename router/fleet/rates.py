"""Measured rates of replicas, smoothed, with priors for rates that no replica has measured yet."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from math import inf
from typing import get_args

from replicas.engine_config import Role
from replicas.stats import ReplicaStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates that predictions use."""

    prefill_tokens_per_s: float
    decode_step_s: float
    transfer_tokens_per_s: float = 50_000.0
    """Rate of KV received from another replica."""
    urgent_tokens_per_s: float | None = None
    """Rate of prompts for which less urgent decodes step aside; None if no replica has measured it."""


class _Smoothed:
    """Owns one smoothed rate per replica, and keeps them sorted for the median."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._by_replica: dict[str, float] = {}
        self._ranked: list[float] = []
        self._last: dict[str, tuple[float, int]] = {}  # replica id -> last measurement, number of different ones

    def observe(self, replica_id: str, measured: float) -> None:
        last, count = self._last.get(replica_id, (0.0, 0))
        if measured == last:
            return  # an idle replica repeats its last measurement, which is no new information
        self._last[replica_id] = measured, count + 1
        old = self._by_replica.get(replica_id)
        if old is not None:
            measured = old + max(self._weight, 1 / (count + 1)) * (measured - old)
            self._drop(old)
        self._by_replica[replica_id] = measured
        insort(self._ranked, measured)

    def forget(self, replica_id: str) -> None:
        old = self._by_replica.pop(replica_id, None)
        if old is not None:
            del self._last[replica_id]
            self._drop(old)

    def get(self, replica_id: str) -> float | None:
        return self._by_replica.get(replica_id)

    @property
    def has_any(self) -> bool:
        return bool(self._ranked)

    def median(self, otherwise: float) -> float:
        ranked, middle = self._ranked, len(self._ranked) // 2
        if not ranked:
            return otherwise
        return ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2

    def _drop(self, value: float) -> None:
        del self._ranked[bisect_left(self._ranked, value)]


class RateModel:
    """Owns the measured rates of replicas of one kind.

    A replica that has measured nothing yet gets the median of its peers, or the prior when there is none, so that a new replica gets
    a sensible prediction. A rate is the mean of the replica's first measurements; each later one moves it by a weight times the
    difference. The prefill rate moves slowly: prompts differ in speed (long ones spend more time in attention), and replicas of one
    kind must not look different because of their last prompts. The decode step moves fast: it shows how many requests decode now.
    """

    def __init__(self, prior: Rates, *, prefill_weight: float = 0.02, decode_weight: float = 0.3) -> None:
        self._prior = prior
        self._prefill = _Smoothed(prefill_weight)  # tokens/s
        self._decode = _Smoothed(decode_weight)  # seconds
        self._transfer = _Smoothed(decode_weight)  # tokens/s
        self._urgent = _Smoothed(prefill_weight)  # tokens/s

    @property
    def has_prefill_rate(self) -> bool:
        """Whether any replica has measured a prefill rate."""
        return self._prefill.has_any

    def typical(self, otherwise: Rates | None = None) -> Rates:
        """The medians over the replicas; for rates that none has measured, `otherwise` (by default the prior)."""
        prior = self._prior if otherwise is None else otherwise
        return Rates(
            prefill_tokens_per_s=self._prefill.median(prior.prefill_tokens_per_s),
            decode_step_s=self._decode.median(prior.decode_step_s),
            transfer_tokens_per_s=self._transfer.median(prior.transfer_tokens_per_s),
            urgent_tokens_per_s=self._urgent.median(0.0) or prior.urgent_tokens_per_s,
        )

    def typical_prefill_tokens_per_s(self, otherwise: float) -> float:
        return self._prefill.median(otherwise)

    def observe(self, replica_id: str, stats: ReplicaStats) -> None:
        """Adds the measurements of one report; absent and invalid ones are skipped."""
        for rates, measured in (
            (self._prefill, stats.prefill_tokens_per_s),
            (self._decode, stats.decode_step_s),
            (self._transfer, stats.transfer_tokens_per_s),
            (self._urgent, stats.urgent_tokens_per_s),
        ):
            if measured is not None and 0 < measured < inf:
                rates.observe(replica_id, measured)

    def forget(self, replica_id: str) -> None:
        for rates in (self._prefill, self._decode, self._transfer, self._urgent):
            rates.forget(replica_id)

    def rates(self, replica_id: str, otherwise: Rates | None = None) -> Rates:
        """One replica's rates; those that it has not measured come from `typical(otherwise)`."""
        typical = self.typical(otherwise)
        prefill, decode, transfer = (rates.get(replica_id) for rates in (self._prefill, self._decode, self._transfer))
        return Rates(
            prefill_tokens_per_s=typical.prefill_tokens_per_s if prefill is None else prefill,
            decode_step_s=typical.decode_step_s if decode is None else decode,
            transfer_tokens_per_s=typical.transfer_tokens_per_s if transfer is None else transfer,
            urgent_tokens_per_s=self._urgent.get(replica_id) or typical.urgent_tokens_per_s,
        )


class PoolRates:
    """Owns the measured rates of one model's replicas, separately for each pool.

    A decode replica computes only short prompts beside many decodes, so its measured prefill rate says little about a long prompt; it
    gets the prefill pool's rate where its own is lower. A pool that has not measured a rate at all gets it from the other pool.
    """

    def __init__(self, prior: Rates) -> None:
        self._prior = prior
        self._pools: dict[Role, RateModel] = {role: RateModel(prior) for role in get_args(Role)}

    def typical_prefill_tokens_per_s(self, role: Role) -> float:
        """The median of the pool; without measurements, of the other pool."""
        return self._pools[role].typical_prefill_tokens_per_s(self._other(role).prefill_tokens_per_s)

    def observe(self, replica_id: str, role: Role, stats: ReplicaStats) -> None:
        self._pools[role].observe(replica_id, stats)

    def forget(self, replica_id: str) -> None:
        for pool in self._pools.values():
            pool.forget(replica_id)

    def rates(self, replica_id: str, role: Role) -> Rates:
        if role == "unified":
            return self._pools[role].rates(replica_id)
        other = self._other(role)
        own = self._pools[role].rates(replica_id, other)
        if role == "decode" and own.prefill_tokens_per_s < other.prefill_tokens_per_s and self._pools["prefill"].has_prefill_rate:
            return replace(own, prefill_tokens_per_s=other.prefill_tokens_per_s)
        return own

    def _other(self, role: Role) -> Rates:
        """The rates of the other pool, for those that this pool has not measured."""
        return self._prior if role == "unified" else self._pools["prefill" if role == "decode" else "decode"].typical()


class DrainRate:
    """Measures how fast a backlogged queue empties, in prompt tokens per second; the basis of Retry-After.

    Only time during which requests wait counts: an idle queue does not show how fast it could drain.
    """

    def __init__(self, *, window_s: float = 1.0, weight: float = 0.3) -> None:
        self._window_s = window_s
        self._weight = weight
        self._rate: float | None = None
        self._since_s: float | None = None  # start of the open window; None while nothing waits
        self._num_tokens = 0

    def observe(self, now_s: float, num_tokens: int, *, is_backlogged: bool) -> None:
        """Records that a request of `num_tokens` left the queue; `is_backlogged`: others still wait."""
        if self._since_s is not None:
            self._num_tokens += num_tokens
            elapsed_s = now_s - self._since_s
            if elapsed_s >= self._window_s:
                measured = self._num_tokens / elapsed_s
                self._rate = measured if self._rate is None else self._rate + self._weight * (measured - self._rate)
                self._since_s, self._num_tokens = now_s, 0
        if not is_backlogged:
            self._since_s, self._num_tokens = None, 0
        elif self._since_s is None:
            self._since_s = now_s

    def tokens_per_s(self, otherwise: float) -> float:
        """The measured rate, at least 1 % of `otherwise` (the replicas' best prefill rate); `otherwise` before a measurement."""
        return otherwise if self._rate is None else max(self._rate, 0.01 * otherwise)
