"""Whether a request met its latency targets."""

from __future__ import annotations

from typing import Literal

from cluster.telemetry.request_record import CLIENT_LEFT, RequestRecord

Outcome = Literal["met", "ttft_missed", "tpot_missed", "failed"]


def outcome_of(record: RequestRecord) -> Outcome | None:
    """None for a request that had no target, or was refused before one was found.

    A request that was rejected, ended in an error, or whose client left before the first token has failed. A client that leaves
    later may have read enough: the request is judged by its first token and the choices that had ended.
    """
    target = record.target
    if target is None:
        return None
    if record.error not in (None, CLIENT_LEFT) or (record.error is not None and record.first_token_s is None):
        return "failed"
    first_s = record.duration_s if record.ttft_s is None else record.ttft_s  # an answer without tokens comes whole
    if target.ttft_s is not None and first_s is not None and first_s > target.ttft_s:
        return "ttft_missed"
    if target.tpot_s is not None and record.tpot_s is not None and record.tpot_s > target.tpot_s:
        return "tpot_missed"
    return "met"
