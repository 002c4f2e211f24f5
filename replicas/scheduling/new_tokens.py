"""How a request grows by the tokens of a step, and when these end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from replicas.request import FailureCause, FinishReason
from replicas.scheduling.request_state import RequestState

MAX_FORCED_TOKENS = 32
"""Most tokens of a grammar appended to one request between two steps. The next step computes all of them, while others wait for it."""


class Ending(NamedTuple):
    """Why and how a request ends."""

    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    failure_cause: FailureCause | None = None


CANCELLED = Ending(FinishReason.CANCELLED)


def failure(state: RequestState, error: str) -> Ending:
    """The ending of a request for which no token could be drawn."""
    is_broken = state.sampling.mask is not None and state.sampling.mask.error is not None
    return Ending(FinishReason.FAILED, error=error, failure_cause=FailureCause.GRAMMAR_BROKEN if is_broken else None)


def take_tokens(state: RequestState, new_ids: Sequence[int]) -> Ending | None:
    """Appends `new_ids` up to the one that ends the request, then tokens that its grammar forces. None: it goes on.

    Forced tokens equal those that would be drawn, for the mask leaves no other. They are not appended before a handoff, since the
    receiving engine appends them itself, and not with log-probabilities, which need the logits of each position.
    """
    if len(state.token_ids) >= state.max_num_tokens:  # max_tokens is 0: the request only scores its prompt
        return Ending(FinishReason.LENGTH)
    if ending := _append(state, new_ids):
        return ending
    mask, request = state.sampling.mask, state.request
    if mask is None or request.wants_handoff or request.params.logprobs is not None:
        return None
    forced_ids = mask.forced_tokens()[:MAX_FORCED_TOKENS]
    num_known = len(state.token_ids)
    ending = _append(state, forced_ids)
    state.num_forced_tokens += len(state.token_ids) - num_known
    return ending


def _append(state: RequestState, new_ids: Sequence[int]) -> Ending | None:
    mask = state.sampling.mask
    for token_id in new_ids:
        state.append(token_id)
        if mask is not None and mask.error is not None:
            return Ending(FinishReason.FAILED, error=mask.error, failure_cause=FailureCause.GRAMMAR_BROKEN)
        if token_id in state.stop_token_ids and state.num_output_tokens > state.request.params.min_tokens:
            return Ending(FinishReason.STOP, token_id)
        if mask is not None and mask.must_end:
            return Ending(FinishReason.STOP, token_id if token_id in state.sampling.eos_token_ids else None)
        if len(state.token_ids) >= state.max_num_tokens:
            return Ending(FinishReason.LENGTH)
    return None
