"""Typed events of one HTTP request, and the Protocol of its observers.

A request has a handful of events, none per token. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from cluster.generation.usage import Usage
from cluster.settings.latency_targets import LatencyTarget
from replicas.grammar_spec import GrammarKind
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
    """The head of the HTTP request has arrived."""

    request_id: str
    method: str
    path: str
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(RequestEvent):
    """The body is valid; whether its model exists is not known yet."""

    user: str | None = None
    """End user named by the client, if any."""
    prompt: object = None
    """The prompt, only when the configuration puts prompts into logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFound(RequestEvent):
    """The model is served here. Only names of such models become labels of metrics."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(RequestEvent):
    """The request is tokenized, fits the model, and runs next."""

    response_id: str
    num_prompt_tokens: int
    num_choices: int = 1
    """Choices of all prompts together."""
    target: LatencyTarget | None = None
    grammar: GrammarKind | None = None
    dropped_keywords: tuple[str, ...] = ()
    """Keywords of the client's schema that the answer does not follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(RequestEvent):
    """The router's first decision on a prompt. Decisions after a loss are preceded by Moved instead."""

    predicted_ttft_s: float | None
    """Predicted time from the decision to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched(RequestEvent):
    """A replica gets a part of choice `index`."""

    index: int
    replica_id: str
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken(RequestEvent):
    """The first token of the request, of any choice, is on its way to the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(RequestEvent):
    """Choice `index` lost a replica. After a lost prefill replica the decode replica may continue."""

    index: int
    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed(RequestEvent):
    """The decode replica of choice `index` recomputes KV that it could not pull."""

    index: int
    reason: RecomputeReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(RequestEvent):
    """Choice `index` needs another decision from the router."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(RequestEvent):
    """The first tokens of choice `index` after a loss, `pause_s` later."""

    index: int
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinished(RequestEvent):
    """The end of choice `index` is on its way to the client."""

    index: int
    reason: FinishReason
    num_tokens: int
    first_token_s: float | None
    """When the first tokens of the choice were on their way to the client; None without tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded(RequestEvent):
    """No part of the request runs any more, for any reason. `usage` counts the tokens that were on their way to the client."""

    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStarted(RequestEvent):
    """The head of the answer was sent."""

    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(RequestEvent):
    """The client gets an error."""

    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned(RequestEvent):
    """The client left before its answer was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(RequestEvent):
    """The last event of every request."""


class RequestObserver(Protocol):
    """Observes one HTTP request from its begin to its end. Called in the event loop: methods must not block and must not raise."""

    def begin(self, event: Begun) -> None: ...

    def see(self, event: RequestEvent) -> None: ...

    def end(self, event: Ended) -> None: ...
