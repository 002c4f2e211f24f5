"""A routing answer as plain JSON values, for people."""

from __future__ import annotations

from router.snapshot import Decision, Rejection


def explanation(answer: Decision | Rejection) -> dict[str, object]:
    """Every candidate with the terms (seconds) of its cost, the cheapest first; or why the request was not admitted."""
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
        "predicted_ttft_s": None if answer.predicted_ttft_s is None else round(answer.predicted_ttft_s, 4),
        "num_cached_tokens": answer.num_cached_tokens,
        "candidates": [
            {
                "replica": score.replica_id,
                "prefill_replica": score.prefill_replica_id,
                "cost_s": round(score.cost, 4),
                "terms": {name: round(value, 4) for name, value in score.terms},
            }
            for score in sorted(answer.candidates, key=lambda score: score.cost)
        ],
    }
