"""State and settings behind the draws of one request. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from replicas.request import GenerationRequest

_MAX_BIAS = 1e30
"""Far above any logit, and finite in float32 also when added to one."""
_MIN_REPETITION, _MAX_REPETITION = 1e-30, 1e30
"""Bounds of a factor that keeps logits finite in float32; beyond them repeated tokens are all or nothing anyway."""


Words = npt.NDArray[np.int32]
"""One bit a token, the lowest bit of the first word for token 0."""


class LogitsMask(Protocol):
    """Which tokens may come next (a grammar). It advances with each token of the request, and can be rolled back."""

    is_slow: bool
    """Set once it took so long that a step did not wait for it. No later step does."""

    @property
    def must_end(self) -> bool:
        """Whether the text is complete, so that no token can follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the mask cannot continue, in words for the client; the request must then fail. It stays once it is set."""
        ...

    def advance(self, token_id: int) -> None: ...

    def rollback(self, num_tokens: int) -> None: ...

    def words(self) -> Words:
        """Has a bit for each token that may come next: W = ceil(V / 32) words, valid until the request grows or shrinks. Computed by the
        first call; another thread may make that call while the owner makes none. Meaningless if `error` is set afterwards."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that come next whatever the model says, perhaps none."""
        ...


class SamplingState:
    """Owns the token counts (for penalties) and the grammar state of one request, and holds the settings of its draws.

    Reads the token list that `RequestState` owns, which reports when it grows (`follow`) or shrinks (`go_back`). Everything derives
    from the request, so a request that is resent with `output_ids` continues as if never interrupted.
    """

    __slots__ = (
        "_bias", "_counts", "_is_plain_greedy", "_num_prompt_tokens", "_suppressed_early", "_token_ids", "choice", "eos_token_ids", "mask",
        "params", "seed",
    )  # fmt: skip

    def __init__(
        self, request: GenerationRequest, token_ids: list[int], eos_token_ids: frozenset[int] = frozenset(), mask: LogitsMask | None = None
    ) -> None:
        """`token_ids`, prompt and output, is the caller's list and is only read. `mask` has not seen any token yet."""
        params = request.params
        self.params = params
        self.seed = request.seed
        self.choice = request.choice
        self.mask = mask
        self._token_ids = token_ids
        self._num_prompt_tokens = len(request.prompt_ids)
        self.eos_token_ids = eos_token_ids
        self._suppressed_early = tuple(sorted(eos_token_ids | frozenset(params.stop_token_ids))) if params.min_tokens else ()
        self._bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None = None  # built on first use, like the counts
        self._counts: _TokenCounts | None = None
        self._is_plain_greedy = params.is_greedy and not params.has_penalties and not params.logit_bias and params.logprobs is None
        if mask is not None:
            for token_id in request.output_ids:
                mask.advance(token_id)

    @property
    def position(self) -> int:
        """Number of output tokens so far; the next token is drawn with the uniform number of this position."""
        return len(self._token_ids) - self._num_prompt_tokens

    @property
    def suppressed_ids(self) -> tuple[int, ...]:
        """Tokens with probability zero now: EOS (also under `ignore_eos`) and stop tokens before `min_tokens`."""
        return self._suppressed_early if self._suppressed_early and self.position < self.params.min_tokens else ()

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the model's logits, without log-probabilities."""
        return self._is_plain_greedy and self.mask is None and not self.suppressed_ids

    @property
    def is_only_masked(self) -> bool:
        """Whether nothing but a mask (and suppression, which the mask then includes) changes the logits."""
        return self.mask is not None and not self.params.has_penalties and not self.params.logit_bias

    @property
    def edits_logits(self) -> bool:
        """Whether penalties, bias, suppression or a mask change the model's logits before the next token is drawn."""
        return self.params.has_penalties or bool(self.params.logit_bias) or self.mask is not None or bool(self.suppressed_ids)

    def allowed_words(self) -> Words:
        """The mask's words without EOS under `ignore_eos`, and without the suppressed tokens. If no token would be left, the mask alone
        decides: a complete text may end before `min_tokens`, and its EOS is not ignored."""
        assert self.mask is not None, "only a request with a grammar has a mask"
        words = self.mask.words()
        hidden = frozenset(self.suppressed_ids) | (self.eos_token_ids if self.params.ignore_eos else frozenset())
        if not hidden:
            return words
        left = words.view(np.uint32).copy()
        for token_id in hidden:
            if token_id < 32 * len(left):
                left[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
        return left.view(np.int32) if left.any() else words

    def follow(self, token_id: int) -> None:
        """Advances counts and grammar: the request's tokens now end with `token_id`."""
        if self._counts is not None:
            self._counts.add(token_id)
        if self.mask is not None:
            self.mask.advance(token_id)

    def go_back(self, gone_ids: Sequence[int]) -> None:
        """Takes back counts and grammar: `gone_ids`, in their order, were removed from the end of the request's tokens."""
        if self._counts is not None:
            for token_id in reversed(gone_ids):
                self._counts.remove(token_id)
        if self.mask is not None:
            self.mask.rollback(len(gone_ids))

    @property
    def repetition_penalty(self) -> float:
        """Finite in float32, and so are the logits that it divides or multiplies."""
        return min(max(self.params.repetition_penalty, _MIN_REPETITION), _MAX_REPETITION)

    def bias(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Token ids of `logit_bias`, and the value added to the logit of each."""
        if self._bias is None:
            biases = self.params.logit_bias
            values = np.fromiter(biases.values(), dtype=np.float64, count=len(biases)).clip(-_MAX_BIAS, _MAX_BIAS)
            self._bias = np.fromiter(biases.keys(), dtype=np.int64, count=len(biases)), values
        return self._bias

    def token_counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Distinct tokens of prompt and output, and the count of each in the output. Views: read them before the request grows."""
        if self._counts is None:
            num_prompt = self._num_prompt_tokens
            self._counts = _TokenCounts(self._token_ids[:num_prompt], self._token_ids[num_prompt:])
        return self._counts.arrays()


class _TokenCounts:
    """Distinct tokens in order of first appearance, with output counts, in arrays that grow by doubling.

    Removal is last in, first out, so a token whose count falls to zero has the last slot.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt_ids)
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}  # token id -> slot
        self._num_prompt_slots = len(self._slots)
        capacity = max(64, 2 * (len(distinct) + len(output_ids)))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(distinct)] = list(distinct)
        self._counts = np.zeros(capacity, dtype=np.int64)
        for token_id in output_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def remove(self, token_id: int) -> None:
        slot = self._slots[token_id]
        self._counts[slot] -= 1
        if self._counts[slot] == 0 and slot >= self._num_prompt_slots:
            del self._slots[token_id]

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]
