"""One line per HTTP request: who asked for what, what it cost and how it ended. Never its text, unless asked for."""

from __future__ import annotations

import json
import logging

from cluster.telemetry.request_record import RequestRecord

logger = logging.getLogger("manta.access")

_MAX_KEYWORDS = 20
_ROUTINE_PATHS = frozenset({"/health", "/version", "/debug/router"})  # load balancers ask every second


def log_access(record: RequestRecord) -> None:
    """Writes the record as one line of JSON."""
    line = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "tenant": record.tenant,
        "user": record.user,
        "response_id": record.response_id,
        "model": record.model,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "queue_ms": _milliseconds(record.queue_s),
        "ttft_ms": _milliseconds(record.ttft_s),
        "predicted_ttft_ms": _milliseconds(record.predicted_ttft_s),
        "duration_ms": _milliseconds(record.duration_s),
        "finish_reason": ",".join(record.finish_reasons) or None,
        "replica": ",".join(record.replicas) or None,
        "recomputes": ",".join(record.recomputes) or None,
        "failovers": record.num_failovers or None,
        "longest_pause_ms": _milliseconds(max(record.pauses_s, default=None)),
        "grammar": record.grammar,
        "dropped_keywords": record.dropped_keywords[:_MAX_KEYWORDS] or None,
        "error": record.error,
        "prompt": record.prompt,
    }
    is_routine = record.path in _ROUTINE_PATHS and record.status == 200
    logger.log(
        logging.DEBUG if is_routine else logging.INFO,
        "%s",
        json.dumps({name: value for name, value in line.items() if value is not None}, ensure_ascii=False),
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
