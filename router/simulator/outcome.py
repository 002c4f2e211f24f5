"""The outcome of each request, and the figures of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class RequestOutcome:
    """One request's times, in seconds of the simulation; None for events that did not happen."""

    request_id: str
    tenant: str
    priority: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_limit_s: float
    tpot_limit_s: float
    replica_id: str | None = None
    prefill_replica_id: str | None = None
    """Set when a pair served the request."""
    dispatch_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    num_cached_tokens: int = 0
    predicted_ttft_s: float | None = None
    is_rejected: bool = False
    retry_after_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between output tokens; None for answers of one token."""
        if self.end_s is None or self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def is_good(self) -> bool:
        """Whether the request met both limits."""
        ttft_s, tpot_s = self.ttft_s, self.tpot_s
        return ttft_s is not None and ttft_s <= self.ttft_limit_s and (tpot_s is None or tpot_s <= self.tpot_limit_s)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, p90, p99 (nearest rank) and maximum; empty without values."""
    if not values:
        return {}
    ranked = sorted(values)
    count = len(ranked)
    found = {f"p{share}": ranked[min(count - 1, -(-count * share // 100) - 1)] for share in (50, 90, 99)}
    return {"mean": sum(ranked) / count, **found, "max": ranked[-1]}


def jain_index(values: Sequence[float]) -> float:
    """Fairness of shares: 1 when all are equal, 1/n when one has everything (Jain et al., DEC-TR-301, 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def summarize(
    outcomes: Sequence[RequestOutcome], *, num_replicas: int, end_s: float, strict_uncached: tuple[float, float] | None = None
) -> dict[str, object]:
    """A run's figures as plain JSON values.

    `strict_uncached` = (seconds, seconds per token) also counts goodput against a limit that grows with the tokens that were
    uncached in this run; the limit in the outcomes is the same for every policy.
    """
    served = [outcome for outcome in outcomes if outcome.first_token_s is not None]
    num_prompt = sum(outcome.num_prompt_tokens for outcome in served)
    num_cached = sum(outcome.num_cached_tokens for outcome in served)
    work: Counter[str] = Counter({f"idle {number}": 0 for number in range(num_replicas)})
    for outcome in served:
        work[outcome.prefill_replica_id or outcome.replica_id or ""] += outcome.num_prompt_tokens - outcome.num_cached_tokens
    busiest = max(work.values(), default=0)
    total_work = sum(work.values())
    good = [outcome for outcome in served if outcome.is_good]
    arrivals_s = max((outcome.arrival_s for outcome in outcomes), default=0.0) or 1.0
    by_tenant: dict[str, float] = defaultdict(float)
    for outcome in served:
        by_tenant[outcome.tenant] += outcome.num_prompt_tokens - outcome.num_cached_tokens + 2 * outcome.num_output_tokens
    predicted = [
        abs(outcome.predicted_ttft_s - actual_s) / actual_s
        for outcome in served
        if outcome.predicted_ttft_s is not None
        and outcome.dispatch_s is not None
        and outcome.first_token_s is not None
        and (actual_s := outcome.first_token_s - outcome.dispatch_s) > 0
    ]
    summary: dict[str, object] = {
        "num_requests": len(outcomes),
        "num_rejected": sum(outcome.is_rejected for outcome in outcomes),
        "end_s": end_s,
        "requests_per_s": len(outcomes) / arrivals_s,
        "hit_rate": num_cached / num_prompt if num_prompt else 0.0,
        "busiest_to_mean_work": busiest * num_replicas / total_work if total_work else 1.0,
        "goodput_share": len(good) / len(outcomes) if outcomes else 0.0,
        "goodput_per_s": len(good) / arrivals_s,
        "ttft_s": percentiles([ttft_s for outcome in served if (ttft_s := outcome.ttft_s) is not None]),
        "tpot_s": percentiles([tpot_s for outcome in served if (tpot_s := outcome.tpot_s) is not None]),
        "ttft_prediction_error": percentiles(predicted),
        "tenant_fairness": jain_index(list(by_tenant.values())) if by_tenant else 1.0,
    }
    if strict_uncached is not None:
        base_s, per_token_s = strict_uncached
        num_good = sum(
            outcome.ttft_s is not None
            and outcome.ttft_s <= base_s + per_token_s * (outcome.num_prompt_tokens - outcome.num_cached_tokens)
            and (outcome.tpot_s is None or outcome.tpot_s <= outcome.tpot_limit_s)
            for outcome in served
        )
        summary["goodput_share_by_own_uncached"] = num_good / len(outcomes) if outcomes else 0.0
    return summary
