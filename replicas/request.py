"""What the gateway asks of a replica, and what comes back. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kvcache.handoff import KVHandoff
from replicas.sampling_params import SamplingParams


class RequestKey(NamedTuple):
    """Names one generation inside an engine: request ids are the client's, choices its `n` siblings."""

    request_id: str
    choice: int


class FinishReason(StrEnum):
    """Why a request ended. STOP and LENGTH are answers, HANDOFF means that another replica goes on; the others are not."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation, complete in itself: any replica can start it, or continue it from `output_ids`.

    Limits, penalties, sampler position and grammar state derive from these fields alone, so that a resend after a
    death (`output_ids` filled, `attempt` raised) goes on exactly where the stream stopped.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Drawn by whoever makes the request when the client gave none; choices share it and differ by `choice`."""
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
    """The gateway that reads the answer; when it dies without a word, the request is cancelled. Empty: nobody's lease."""
    wants_handoff: bool = False
    """End with the first generated token, and lease the KV to the replica that goes on."""
    trace_context: TraceContext = TraceContext()
    handoff: KVHandoff | None = None
    """KV to start from. When it cannot be had it is computed, so the answer is the same."""

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.choice)

    @property
    def ends_with_its_first_token(self) -> bool:
        """Then there is nothing that another replica could go on with."""
        return self.params.max_tokens is not None and len(self.output_ids) + 1 >= self.params.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Not once a token was emitted: they came with the first one, in the same message."""
        return self.params.prompt_logprobs is not None and not self.output_ids


class TokenLogprob(NamedTuple):
    """Log-probability of one token under the model, with the most probable alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """New tokens of one request; the last one of each request, and only it, has a `finish_reason`.

    A stop token (EOS or one of `stop_token_ids`) is the last of `token_ids`; text leaves it out.
    """

    key: RequestKey
    attempt: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token when asked for, else empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """One per prompt token after the first, once for each request that asks, with its first token or, at zero tokens, its end."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended it, when `finish_reason` is STOP."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    error: str | None = None
    """The reason, when `finish_reason` is FAILED."""
    handoff: KVHandoff | None = None
    """Once for each request that wants one, as soon as its first chunk is computed: pulling may begin."""


def merge_progress(earlier: RequestProgress, later: RequestProgress) -> RequestProgress:
    """One message with the tokens of both, in order, and the later one's ending."""
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=later.prompt_logprobs if earlier.prompt_logprobs is None else earlier.prompt_logprobs,
        handoff=earlier.handoff or later.handoff,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one engine step produced. `progress` holds each request at most once."""

    progress: tuple[RequestProgress, ...] = ()
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    cuts_a_prompt: bool = False
    """Whether the step took in as many tokens of prompts as it might, and left some."""
    step_s: float = 0.0


class RequestRejected(ValueError):
    """The request can never be served by this engine (too long, token id outside the vocabulary, duplicate id).

    Not raised for a full queue or a full cache: those wait.
    """
