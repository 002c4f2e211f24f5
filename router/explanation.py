"""A routing answer as plain JSON values, for people to read. The router's README defines the terms."""

from __future__ import annotations

from router.snapshot import CandidateLoad, CandidateScore, Decision, Rejection


def explanation(answer: Decision | Rejection) -> dict[str, object]:
    """A decision with every candidate, the best first, each with the terms (seconds) of its cost or the load that the policy saw; or a
    rejection with its reason."""
    if isinstance(answer, Rejection):
        return {
            "request_id": answer.request_id,
            "rejected": answer.reason,
            "retry_after_s": round(answer.retry_after_s, 1),
            "kind": answer.kind,
        }
    return {
        "request_id": answer.request_id,
        "replica": answer.replica_id,
        "role": answer.replica_role,
        "prefill_replica": answer.prefill_replica_id,
        "predicted_ttft_s": None if answer.predicted_ttft_s is None else _rounded(answer.predicted_ttft_s),
        "num_cached_tokens": answer.num_cached_tokens,
        "candidates": [_candidate(candidate) for candidate in sorted(answer.candidates, key=_order)],
    }


def _order(candidate: CandidateScore | CandidateLoad) -> float:
    return candidate.num_requests if isinstance(candidate, CandidateLoad) else candidate.cost_s


def _candidate(candidate: CandidateScore | CandidateLoad) -> dict[str, object]:
    if isinstance(candidate, CandidateLoad):
        return {"replica": candidate.replica_id, "num_requests": candidate.num_requests, "num_tokens": candidate.num_tokens}
    return {
        "replica": candidate.replica_id,
        "prefill_replica": candidate.prefill_replica_id,
        "cost_s": _rounded(candidate.cost_s),
        "terms": {name: _rounded(seconds) for name, seconds in candidate.terms},
    }


def _rounded(seconds: float) -> float:
    """To a tenth of a millisecond, and never -0.0."""
    return round(seconds, 4) + 0.0
