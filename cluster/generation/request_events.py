"""Typed events of one HTTP request, and the Protocol of those who watch it.

A handful per request, none per token. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from cluster.generation.usage import Usage
from cluster.settings.latency_targets import LatencyTarget
from replicas.handoff.paired_progress import RecomputeReason
from replicas.request import FinishReason

Part = Literal["whole", "prefill", "decode"]
"""The share of a choice that a replica computes: all of it, or one side of a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent:
    """Base of all events."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(RequestEvent):
    """The head of the HTTP request is here."""

    request_id: str
    method: str
    path: str
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(RequestEvent):
    """The body is right in itself; whether its model exists is not known yet."""

    user: str | None = None
    """End user that the client names, if any."""
    prompt: object = None
    """None unless the configuration puts prompts into logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFound(RequestEvent):
    """The model is served here. Only such names become labels of metrics."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(RequestEvent):
    """The request is tokenized, fits, and runs next."""

    response_id: str
    num_prompt_tokens: int
    num_choices: int = 1
    """For all prompts together."""
    target: LatencyTarget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(RequestEvent):
    """The router's first decision on a prompt. Those that follow a loss come with Moved."""

    predicted_ttft_s: float | None
    """From the decision to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched(RequestEvent):
    """A replica gets a part of choice `index`."""

    index: int
    replica_id: str
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken(RequestEvent):
    """The first token of the request, whatever the choice, is on its way to the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(RequestEvent):
    """Choice `index` lost a replica. After a lost prefill replica the decode replica may go on."""

    index: int
    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed(RequestEvent):
    """The decode replica of choice `index` computes what it could not take over."""

    index: int
    reason: RecomputeReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(RequestEvent):
    """Choice `index` needs another decision of the router."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(RequestEvent):
    """The first tokens of choice `index` after a loss, `pause_s` later."""

    index: int
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinished(RequestEvent):
    """The client gets the end of choice `index`."""

    index: int
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded(RequestEvent):
    """Nothing of the request runs any more, whatever the reason. `usage` counts what was on its way to the client."""

    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStarted(RequestEvent):
    """The head of the answer is out."""

    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(RequestEvent):
    """The client is told of an error."""

    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned(RequestEvent):
    """The client left before its answer was whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(RequestEvent):
    """The last event of every request."""


class RequestObserver(Protocol):
    """Sees one HTTP request from its begin to its end. Called in the event loop: it returns at once and raises nothing."""

    def begin(self, event: Begun) -> None: ...

    def see(self, event: RequestEvent) -> None: ...

    def end(self, event: Ended) -> None: ...
