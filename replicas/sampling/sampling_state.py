"""What the sampler needs to know of one running request. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from replicas.request import TokenLogprob
from replicas.sampling_params import SamplingParams

_MAX_BIAS = 1e30
"""Far above any logit, and finite in float32 also when added to one."""


class LogitsMask(Protocol):
    """Which tokens may come next (a grammar). It moves with the request: forward on a token, back on a rollback."""

    def advance(self, token_id: int) -> None: ...

    def rollback(self, num_tokens: int) -> None: ...

    def fill(self, allowed_V: npt.NDArray[np.bool_]) -> None:
        """Sets False where a token is not allowed; all are True on entry."""
        ...


class SamplingState:
    """Output of one request as sampling sees it: position, token counts for penalties, grammar state.

    Owned by the engine, read by the sampler. Everything derives from the constructor's arguments, so a request that is
    resent with `output_ids` goes on as if never interrupted.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        eos_token_ids: frozenset[int] = frozenset(),
        mask: LogitsMask | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.choice = choice
        self.mask = mask
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        """Tokens that end the request."""
        self.prompt_logprobs: list[TokenLogprob] | None = None if params.prompt_logprobs is None or output_ids else []
        """What is known of the prompt so far; None when it was not asked for, or is reported."""
        self.bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64, count=len(params.logit_bias))
        self.bias_values = np.fromiter(params.logit_bias.values(), dtype=np.float64, count=len(params.logit_bias))
        self.bias_values = self.bias_values.clip(-_MAX_BIAS, _MAX_BIAS)
        self._prompt_ids = prompt_ids
        self._output_ids = list(output_ids)
        self._suppressed_early = tuple(sorted(eos_token_ids | frozenset(params.stop_token_ids)))
        self._counts: _TokenCounts | None = None  # built on first use: most requests have no penalties
        self._is_plain_greedy = params.is_greedy and not params.has_penalties and not params.logit_bias and params.logprobs is None
        if mask is not None:
            for token_id in output_ids:
                mask.advance(token_id)

    @property
    def position(self) -> int:
        """Number of output tokens so far; the next token is drawn with the uniform number of this position."""
        return len(self._output_ids)

    @property
    def suppressed_ids(self) -> tuple[int, ...]:
        """Tokens with probability zero now: EOS (also under `ignore_eos`) and stop tokens before `min_tokens`."""
        return self._suppressed_early if self.position < self.params.min_tokens else ()

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the model's logits and nothing else is asked for."""
        return self._is_plain_greedy and self.mask is None and not self.suppressed_ids

    @property
    def edits_logits(self) -> bool:
        """Whether penalties, bias, suppression or a mask change the model's logits before the next token is drawn."""
        return self.params.has_penalties or bool(self.params.logit_bias) or self.mask is not None or bool(self.suppressed_ids)

    def append(self, token_id: int) -> None:
        """The request now ends with `token_id`."""
        self._output_ids.append(token_id)
        if self._counts is not None:
            self._counts.add(token_id)
        if self.mask is not None:
            self.mask.advance(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Forgets the last `num_tokens` output tokens (rejected drafts)."""
        if not 0 <= num_tokens <= self.position:
            raise ValueError(f"num_tokens must be in [0, {self.position}], got {num_tokens}")
        for _ in range(num_tokens):
            token_id = self._output_ids.pop()
            if self._counts is not None:
                self._counts.remove(token_id)
        if self.mask is not None and num_tokens:
            self.mask.rollback(num_tokens)

    def token_counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Distinct tokens of prompt and output, and how often the output holds each. Views: read before the next append."""
        if self._counts is None:
            self._counts = _TokenCounts(self._prompt_ids, self._output_ids)
        return self._counts.arrays()


class _TokenCounts:
    """Distinct tokens in order of first appearance, with output counts, in arrays that grow by doubling.

    Removal is last in, first out, so a token that leaves entirely holds the last slot.
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
