"""One line per HTTP request: who asked for what, what it cost and how it ended. Never its text, unless asked for."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field

logger = logging.getLogger("manta.access")

_ROUTINE_PATHS = frozenset({"/health", "/version", "/debug/router"})  # load balancers ask every second


@dataclass(slots=True, kw_only=True)
class AccessRecord:
    """Filled in while a request is served; times are seconds of one monotonic clock."""

    request_id: str
    method: str
    path: str
    started_s: float
    tenant: str = "default"
    user: str | None = None
    response_id: str | None = None
    model: str | None = None
    status: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_s: float | None = None
    """From arrival to the router's decision."""
    decided_s: float | None = None
    """When the router's first decision came."""
    predicted_ttft_s: float | None = None
    """From that decision to the first token, as the router saw it."""
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    """Every replica that served a part of it, in order of first use."""
    num_pairs: int = 0
    """How often a choice was sent to a prefill and a decode replica."""
    recomputes: list[str] = field(default_factory=list)
    """For each choice whose decode replica could not take over from the prefill one: why it had to compute the prompt itself."""
    num_losses: int = 0
    """Replicas that choices lost, those among them whose partner went on by itself."""
    num_failovers: int = 0
    pauses_s: list[float] = field(default_factory=list)
    """For each choice that went on elsewhere: from the loss of its replica until its next token."""
    error: str | None = None
    prompt: object = None
    """Set only when the configuration asks for prompts in the log."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def prediction_ratio(self) -> float | None:
        """Actual over predicted time from decision to first token; None after a loss on the way, which nobody predicts."""
        if self.first_token_s is None or self.decided_s is None or not self.predicted_ttft_s:
            return None
        if self.num_losses or self.recomputes:
            return None
        return (self.first_token_s - self.decided_s) / self.predicted_ttft_s

    @property
    def duration_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.started_s

    def note_replica(self, replica_id: str) -> None:
        if replica_id not in self.replicas:
            self.replicas.append(replica_id)


def log_access(record: AccessRecord) -> None:
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
