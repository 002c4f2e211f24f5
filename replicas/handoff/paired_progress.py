"""Merges the progress of one request from a prefill and a decode replica into one stream. Pure, and free of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from replicas.request import FinishReason, GenerationRequest, RequestProgress, merge_progress

RecomputeReason = Literal["prefill_lost", "first_token_differs"]
"""Why the decode side must compute a request's KV itself although it has a prefill side."""

BAD_ENDINGS = frozenset({FinishReason.CANCELLED, FinishReason.FAILED})


class PairedProgress:
    """Owns the tokens of one request that its reader got from the prefill side, and the position of the decode side.

    The reader gets each token once, with its own log-probability, from the side that has it first; the number of cached tokens
    is the prefill side's. A token is never taken back: `resend_reason` is set when the decode side cannot continue the stream.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._wants_logprobs = request.params.logprobs is not None
        self._first_ids: tuple[int, ...] = ()
        self._num_decoded = 0  # tokens of the decode side that the reader has, from either side
        self._held: RequestProgress | None = None
        self._num_cached_tokens = 0
        self._is_prefill_lost = False
        self._resend_reason: RecomputeReason | None = None

    @property
    def first_ids(self) -> tuple[int, ...]:
        """The tokens that the reader got from the prefill side."""
        return self._first_ids

    @property
    def has_decoded(self) -> bool:
        """Whether the decode side has reported any token."""
        return self._num_decoded > 0 or self._held is not None

    @property
    def resend_reason(self) -> RecomputeReason | None:
        """Set once the request must be sent to the decode side anew: as a higher attempt, without a handoff, with the reader's
        tokens in `output_ids`. From then on the merge returns nothing."""
        return self._resend_reason

    def take_prefill(self, item: RequestProgress) -> RequestProgress | None:
        """Takes a message of the prefill side; for a bad ending call `lose_prefill` instead. Returns the progress for the reader,
        if any.

        STOP and LENGTH end the stream, HANDOFF does not.
        """
        assert item.finish_reason not in BAD_ENDINGS, "a prefill that ends badly is lost"
        self._num_cached_tokens = max(self._num_cached_tokens, item.num_cached_tokens)
        if self._num_decoded or self._resend_reason is not None:
            return None  # the decode side was first and also reports the ending
        is_ending = item.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not item.token_ids and not is_ending:
            return None
        self._first_ids += item.token_ids
        told = replace(item, handoff=None) if is_ending else replace(item, handoff=None, finish_reason=None)
        held, self._held = self._held, None
        if held is None or is_ending:
            return told
        following = self.take_decode(held)
        return told if following is None else merge_progress(told, following)

    def take_decode(self, item: RequestProgress) -> RequestProgress | None:
        """Takes a message of the decode side, with any ending. Returns the progress for the reader, if any."""
        if self._resend_reason is not None:
            return None
        if self._held is not None:
            item, self._held = merge_progress(self._held, item), None
        num_known = max(0, min(len(item.token_ids), len(self._first_ids) - self._num_decoded))
        if item.token_ids[:num_known] != self._first_ids[self._num_decoded : self._num_decoded + num_known]:
            self._resend_reason = "first_token_differs"
            return None
        if self._wants_logprobs and len(item.token_ids) - len(item.logprobs) > num_known:
            return self._hold(item)
        self._num_decoded += len(item.token_ids)
        new_ids = item.token_ids[num_known:]
        if not new_ids and item.finish_reason is None:
            return None
        num_cached_tokens = item.num_cached_tokens if self._is_prefill_lost else self._num_cached_tokens
        logprobs = item.logprobs[max(0, len(item.logprobs) - len(new_ids)) :]
        return replace(item, token_ids=new_ids, logprobs=logprobs, num_cached_tokens=num_cached_tokens)

    def lose_prefill(self) -> None:
        """Notes that the prefill side failed or is gone. The decode side continues if it can."""
        self._is_prefill_lost = True
        if self._held is not None:
            self._resend_reason = "prefill_lost"

    def _hold(self, item: RequestProgress) -> RequestProgress | None:
        """Keeps tokens that came with the handoff before the prefill side's own message, which alone has their log-probabilities.
        A bad ending is returned at once, without these tokens."""
        if item.finish_reason in BAD_ENDINGS:
            return replace(item, token_ids=(), logprobs=())
        if self._is_prefill_lost:
            self._resend_reason = "prefill_lost"
        else:
            self._held = item
        return None
