"""Contracts between gateway and replica: requests, progress, step outputs. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kvcache.handoff import KVHandoff
from replicas.sampling_params import SamplingParams


class RequestKey(NamedTuple):
    """Name of one generation inside an engine: the request id, and its number among the `n` choices."""

    request_id: str
    choice: int


class FinishReason(StrEnum):
    """Why a request ended. STOP and LENGTH are answers; HANDOFF means that another replica continues; the rest are not answers."""

    STOP = "stop"
    LENGTH = "length"
    HANDOFF = "handoff"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TraceContext(NamedTuple):
    """The distributed trace that a request belongs to, as W3C Trace Context writes it (https://www.w3.org/TR/trace-context/)."""

    traceparent: str = ""
    """Empty when the client told of no trace."""
    tracestate: str = ""


class FailureCause(StrEnum):
    """Why a request FAILED where the cause lies in the request; the error is then written for its client."""

    GRAMMAR_REFUSED = "grammar_refused"
    """Its grammar cannot be compiled here. No token was generated."""
    GRAMMAR_BROKEN = "grammar_broken"
    """Its grammar reached a limit in the middle of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation, complete in itself: any replica can start it, or continue it from `output_ids`.

    Limits, penalties, sampler position and grammar state derive from these fields alone, so that a resend after a
    replica's death (`output_ids` filled, `attempt` raised) continues exactly where the stream stopped.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """The client's, or drawn by the gateway or `LLM`; choices share it and differ by `choice`."""
    output_ids: tuple[int, ...] = ()
    """Tokens already emitted by an earlier attempt; they count against `max_tokens`."""
    choice: int = 0
    attempt: int = 0
    priority: int = 0
    """Smaller is more urgent."""
    tenant: str = "default"
    deadline_s: float | None = None
    """Unix time by which the first token is due (the SLO), if any."""
    cache_salt: str = ""
    adapter_id: str | None = None
    arrival_s: float = 0.0
    """Unix time at which the gateway accepted the request."""
    caller: str = ""
    """The gateway that reads the answer; when its lease at the router expires, the request is cancelled. Empty: no lease."""
    wants_handoff: bool = False
    """End with the first generated token, and lease the KV to the replica that continues."""
    trace_context: TraceContext = TraceContext()
    speculates: bool = True
    """False: no tokens are drafted for this request, whatever the engine's speculation. The answer is the same."""
    predicted_ids: tuple[int, ...] = ()
    """The answer that the client expects, as drafts; used by engines with any speculation."""
    handoff: KVHandoff | None = None
    """KV to start from. If the transfer fails, the KV is computed here, so the answer is the same."""

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.choice)

    @property
    def ends_with_its_first_token(self) -> bool:
        """Whether the next token ends the request, so that another replica has nothing to continue."""
        return self.params.max_tokens is not None and len(self.output_ids) + 1 >= self.params.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """False once a token was emitted: the log-probabilities came in the same message as the first token."""
        return self.params.prompt_logprobs is not None and not self.output_ids


class TokenLogprob(NamedTuple):
    """Log-probability of one token under the model, with the most probable alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """New tokens of one request. The last progress of a request, and only it, has a `finish_reason`.

    A stop token (EOS or one of `stop_token_ids`) is the last of `token_ids`; text leaves it out.
    """

    key: RequestKey
    attempt: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token if requested, else empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """One per prompt token after the first, if requested; sent once, with the first token or, if `max_tokens` is 0, with the end."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the request, if `finish_reason` is STOP."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    error: str | None = None
    """The reason, if `finish_reason` is FAILED."""
    num_accepted_predicted: int = 0
    """Of the request's `predicted_ids`, those that were drafted and accepted since the last progress."""
    num_rejected_predicted: int = 0
    """The same, drafted and refused."""
    failure_cause: FailureCause | None = None
    """None: the reason is not in the request, and `error` is for the log."""
    handoff: KVHandoff | None = None
    """Sent once for each request with `wants_handoff`, as soon as its first chunk is computed: pulling may begin."""


def merge_progress(earlier: RequestProgress, later: RequestProgress) -> RequestProgress:
    """One message with the tokens of both, in order, and the ending of the later one."""
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=later.prompt_logprobs if earlier.prompt_logprobs is None else earlier.prompt_logprobs,
        num_accepted_predicted=earlier.num_accepted_predicted + later.num_accepted_predicted,
        num_rejected_predicted=earlier.num_rejected_predicted + later.num_rejected_predicted,
        handoff=earlier.handoff or later.handoff,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of one engine step. `progress` holds each request at most once."""

    progress: tuple[RequestProgress, ...] = ()
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    """Drafts included."""
    num_drafts: int = 0
    """Drafted tokens among them, accepted or not."""
    num_preemptions: int = 0
    num_paused: int = 0
    """Decodes that stepped aside for more urgent prompts."""
    is_graphed: bool = False
    """Whether the step was replayed as a CUDA graph."""
    cuts_a_prompt: bool = False
    """Whether a prompt continues in a later step because this one had no room for all of it."""
    step_s: float = 0.0


class RequestRejected(ValueError):
    """The request can never be served by this engine (too long, token id outside the vocabulary, duplicate id).

    Not raised for a full queue or a full cache: such a request waits.
    """
