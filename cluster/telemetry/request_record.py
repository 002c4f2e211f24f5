"""One HTTP request as its events tell it, and the subscriber that keeps it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.generation.request_events import (
    Abandoned,
    AnswerStarted,
    Begun,
    ChoiceFinished,
    Decided,
    Dispatched,
    Ended,
    Failed,
    FirstToken,
    GenerationEnded,
    Lost,
    ModelFound,
    Moved,
    Parsed,
    Prepared,
    Recomputed,
    RequestEvent,
    Resumed,
)
from cluster.settings.latency_targets import LatencyTarget

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499  # nginx's name for a client that left before its answer; seen in log and metrics only
CLIENT_LEFT = "client disconnected"


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Filled in by the events of one request; times are seconds of their clock."""

    request_id: str
    method: str
    path: str
    started_s: float
    tenant: str = "default"
    user: str | None = None
    response_id: str | None = None
    model: str | None = None
    status: int | None = None
    num_choices: int = 1
    target: LatencyTarget | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    decided_s: float | None = None
    """When the router's first decision came."""
    predicted_ttft_s: float | None = None
    """From that decision to the first token, as the router saw it."""
    first_token_s: float | None = None
    token_time_s: float = 0.0
    """From the first tokens of each choice that ended to its end, in all."""
    num_gaps: int = 0
    """Tokens of these choices after each one's first."""
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
    grammar: str | None = None
    """Kind of the grammar that the answer follows."""
    dropped_keywords: tuple[str, ...] = ()
    """Keywords of the client's schema that it does not follow."""
    error: str | None = None
    prompt: object = None
    """Set only when the configuration asks for prompts in the log."""

    @property
    def queue_s(self) -> float | None:
        """From arrival to the router's decision."""
        return None if self.decided_s is None else self.decided_s - self.started_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between two tokens of a choice, over the choices that ended. None without a second token."""
        return self.token_time_s / self.num_gaps if self.num_gaps else None

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

    def see(self, event: RequestEvent) -> None:
        """Takes in what `event` tells."""
        match event:
            case Parsed():
                self.user, self.prompt = event.user, event.prompt
            case ModelFound():
                self.model = event.model
            case Prepared():
                self.response_id, self.target = event.response_id, event.target
                self.num_prompt_tokens, self.num_choices = event.num_prompt_tokens, event.num_choices
                self.grammar, self.dropped_keywords = event.grammar, event.dropped_keywords
            case GenerationEnded():
                self.num_cached_tokens, self.num_output_tokens = event.usage.num_cached_tokens, event.usage.num_output_tokens
            case AnswerStarted():
                self.status = event.status
            case Failed():
                self.error = event.code
            case Abandoned():
                self.status, self.error = CLIENT_CLOSED, CLIENT_LEFT
            case _:
                self._see_choices(event)

    def _see_choices(self, event: RequestEvent) -> None:
        """Events between the router's decision and the end of the last choice."""
        match event:
            case Decided():
                if self.decided_s is None:
                    self.decided_s, self.predicted_ttft_s = event.at_s, event.predicted_ttft_s
            case Dispatched():
                self.num_pairs += event.part == "prefill"
                if event.replica_id not in self.replicas:
                    self.replicas.append(event.replica_id)
            case FirstToken():
                self.first_token_s = event.at_s
            case Lost():
                self.num_losses += 1
            case Recomputed():
                self.recomputes.append(event.reason)
            case Moved():
                self.num_failovers += 1
            case Resumed():
                self.pauses_s.append(event.pause_s)
            case ChoiceFinished():
                self.finish_reasons.append(event.reason.value)
                if event.first_token_s is not None:
                    self.token_time_s += event.at_s - event.first_token_s
                    self.num_gaps += event.num_tokens - 1


class RequestRecorder:
    """A RequestObserver: keeps the record of one request and hands it to every sink when the request has ended."""

    def __init__(self, *sinks: Callable[[RequestRecord], None]) -> None:
        self._sinks = sinks
        self._record: RequestRecord | None = None

    def begin(self, event: Begun) -> None:
        self._record = RequestRecord(
            request_id=event.request_id, method=event.method, path=event.path, started_s=event.at_s, tenant=event.tenant
        )

    def see(self, event: RequestEvent) -> None:
        assert self._record is not None, "no event comes before Begun"
        self._record.see(event)

    def end(self, event: Ended) -> None:
        assert self._record is not None, "no event comes before Begun"
        self._record.finished_s = event.at_s
        for sink in self._sinks:
            try:
                sink(self._record)
            except Exception:
                logger.exception("request %s: a sink of its record failed", self._record.request_id)
