"""Next tokens from logits, vectorised over requests with different settings.

Shapes: R rows (requests), V vocabulary, S rows that are sampled, P the rows of S with a filter, K candidates,
N (row, token) pairs, B spans of W token ids.

A row's token depends on that row alone: every operation works row by row, with an order of summation that does not
depend on the number of rows. (The order of a plain `sum` does: torch splits one long row over threads.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from replicas.native.thread_team import without_torch_threads
from replicas.request import TokenLogprob
from replicas.sampling.masked_draw import BAD_LOGITS, NONE_ALLOWED, mask_logits, masked_draw
from replicas.sampling.native_draw import MAX_TEMPERATURE, MIN_TEMPERATURE, NativeDraw
from replicas.sampling.philox import uniforms
from replicas.sampling.sampling_state import SamplingState
from replicas.sampling_params import MAX_LOGPROBS

_CHUNK_ELEMENTS = 1 << 24
"""Most logits copied at a time, whatever the batch: 64 MiB in float32."""
_NUM_CANDIDATES = (256, 4096)
"""top_p looks at this many of the most probable tokens before it sorts all (32 rows of 49,152: 72 ms for all, 4 ms for 256)."""
_SPAN = 64
"""Token ids summed together on the way to the CDF."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """One token per row. A row in `errors` has no token: its request fails, and its entry in `token_ids` is meaningless."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    errors: dict[int, str] = field(default_factory=dict)
    """row -> why no token could be drawn."""


class Sampler:
    """Draws tokens; holds no state of any request.

    With `native`, the filters and the draw are one compiled call that reads the logits in place.
    """

    def __init__(self, vocab_size: int, native: NativeDraw | None = None) -> None:
        self.vocab_size = vocab_size
        self._native = native

    @torch.inference_mode()
    def sample(self, logits_RV: Tensor, states: Sequence[SamplingState]) -> SampledTokens:
        """The next token of each row, at the position of its state. Changes neither logits nor states.

        Order: repetition, presence and frequency penalties, logit_bias, suppression and mask, temperature, top_k, top_p,
        min_p; then the inverse CDF in token-id order at the row's uniform number. Logits that are NaN or +inf, or a row
        where no token is allowed, become an entry of `errors`, never an exception.
        """
        assert logits_RV.shape == (len(states), self.vocab_size), (logits_RV.shape, len(states), self.vocab_size)
        if not states:
            return SampledTokens(token_ids=[], logprobs=[])
        with self._own_threads():
            return self._sample(logits_RV, states)

    def _own_threads(self) -> AbstractContextManager[None]:
        return nullcontext() if self._native is None else without_torch_threads()

    def _sample(self, logits_RV: Tensor, states: Sequence[SamplingState]) -> SampledTokens:
        plain = [row for row, state in enumerate(states) if state.is_plain_greedy]
        others = [row for row, state in enumerate(states) if not state.is_plain_greedy]
        token_ids = [0] * len(states)
        logprobs: list[TokenLogprob | None] = [None] * len(states)
        errors: dict[int, str] = {}

        can_read = self._native is not None and self._native.can_read(logits_RV)
        if plain and self._native is not None and can_read:
            for row, token_id in zip(plain, self._native.argmax(logits_RV, plain), strict=True):
                token_ids[row] = max(token_id, 0)
                if token_id < 0:
                    errors[row] = BAD_LOGITS
        elif plain:
            argmax_R = logits_RV.argmax(-1)
            best_R = logits_RV.gather(-1, argmax_R[:, None])[:, 0].float()
            argmax, best = argmax_R.tolist(), best_R.tolist()
            for row in plain:
                token_ids[row] = argmax[row]
                if not math.isfinite(best[row]):
                    errors[row] = BAD_LOGITS
        copied = others
        if self._native is not None and can_read:
            copied = _draw_natively(self._native, logits_RV, others, states, token_ids, errors)
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // self.vocab_size)
        for start in range(0, len(copied), rows_per_chunk):
            chunk = copied[start : start + rows_per_chunk]
            self._sample_chunk(logits_RV, chunk, [states[row] for row in chunk], token_ids, errors)
        asked = [row for row in others if states[row].params.logprobs is not None and row not in errors]
        for start in range(0, len(asked), rows_per_chunk):
            chunk = asked[start : start + rows_per_chunk]
            wanted = [states[row].params.logprobs or 0 for row in chunk]
            found = _logprobs(logits_RV[chunk].float(), [token_ids[row] for row in chunk], wanted)
            for row, logprob in zip(chunk, found, strict=True):
                logprobs[row] = logprob
        return SampledTokens(token_ids=token_ids, logprobs=logprobs, errors=errors)

    @torch.inference_mode()
    def score(self, logits_RV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Log-probability of the given token in each row, with the row's `num_top` best; NaN if logits are not finite."""
        found: list[TokenLogprob] = []
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // self.vocab_size)
        for start in range(0, len(token_ids), rows_per_chunk):
            ids = list(token_ids[start : start + rows_per_chunk])
            with self._own_threads():
                found += _logprobs(logits_RV[start : start + len(ids)].float(), ids, [num_top] * len(ids))
        return found

    def _sample_chunk(
        self, logits_RV: Tensor, rows: list[int], states: list[SamplingState], token_ids: list[int], errors: dict[int, str]
    ) -> None:
        """Draws for `rows` (their `states` in the same order) into `token_ids` and `errors`."""
        work_RV = logits_RV[rows].float()  # indexing copies, so work_RV may be changed
        is_bad = (~work_RV.amax(-1).isfinite()).tolist()
        edit_logits(work_RV, states)
        best = work_RV.amax(-1).tolist()
        token_R = torch.zeros(len(rows), dtype=torch.int64, device=work_RV.device)
        usable = [i for i in range(len(rows)) if not is_bad[i] and math.isfinite(best[i])]
        greedy = [i for i in usable if states[i].params.is_greedy]
        sampled = [i for i in usable if not states[i].params.is_greedy]
        if greedy:
            token_R[greedy] = _take(work_RV, greedy).argmax(-1)
        if sampled and self._native is not None and self._native.can_read(work_RV):
            token_R[sampled] = torch.tensor(self._native.draw(work_RV, sampled, [states[i] for i in sampled]))
        elif sampled:
            token_R[sampled] = _draw(_take(work_RV, sampled), [states[i] for i in sampled])
        for i, token_id in enumerate(token_R.tolist()):
            token_ids[rows[i]] = token_id
            mask = states[i].mask
            if is_bad[i]:
                errors[rows[i]] = BAD_LOGITS
            elif mask is not None and mask.error is not None:  # what it allows then means nothing
                errors[rows[i]] = mask.error
            elif best[i] == -math.inf:
                errors[rows[i]] = NONE_ALLOWED
            elif not math.isfinite(best[i]):
                errors[rows[i]] = _OVERFLOW


def _draw_natively(
    native: NativeDraw, logits_RV: Tensor, rows: list[int], states: Sequence[SamplingState], token_ids: list[int], errors: dict[int, str]
) -> list[int]:
    """Draws for those of `rows` whose logits are used as they are, or under a mask alone; returns the others."""
    direct = [row for row in rows if not states[row].params.is_greedy and not states[row].edits_logits]
    for row, token_id in zip(direct, native.draw(logits_RV, direct, [states[row] for row in direct]), strict=True):
        token_ids[row] = max(token_id, 0)
        if token_id < 0:
            errors[row] = BAD_LOGITS
    masked = [row for row in rows if states[row].is_only_masked]
    if masked:
        masked_draw(native, logits_RV, masked, [states[row] for row in masked], token_ids, errors)
    done = {*direct, *masked}
    return [row for row in rows if row not in done]


_OVERFLOW = "penalties made the logits overflow; use a repetition_penalty nearer to 1"


def _take(work_RV: Tensor, rows: list[int]) -> Tensor:
    """`work_RV[rows]`, without the copy when that is all of it."""
    return work_RV if len(rows) == len(work_RV) else work_RV[rows]


def edit_logits(work_RV: Tensor, states: Sequence[SamplingState]) -> None:
    """Penalties, logit_bias, suppression and masks on `work_RV` (float32), in place."""
    _apply_penalties(work_RV, states)
    _apply_bias(work_RV, states)
    _apply_suppression(work_RV, states)
    _apply_masks(work_RV, states)


def _apply_penalties(work_RV: Tensor, states: Sequence[SamplingState]) -> None:
    """Repetition (CTRL, arXiv 1909.05858), then presence and frequency (OpenAI), in place."""
    rows = [row for row, state in enumerate(states) if state.params.has_penalties]
    if not rows:
        return
    arrays = [states[row].token_counts() for row in rows]
    sizes = [len(ids) for ids, _ in arrays]
    device = work_RV.device

    def per_pair(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes)).to(device)

    row_N = torch.from_numpy(np.repeat(np.array(rows), sizes)).to(device)
    id_N = torch.from_numpy(np.concatenate([ids for ids, _ in arrays])).to(device)
    count_N = torch.from_numpy(np.concatenate([counts for _, counts in arrays])).to(device, torch.float32)
    repetition_N = per_pair([states[row].repetition_penalty for row in rows])
    presence_N = per_pair([states[row].params.presence_penalty for row in rows])
    frequency_N = per_pair([states[row].params.frequency_penalty for row in rows])
    value_N = work_RV[row_N, id_N]
    value_N = torch.where(value_N < 0, value_N * repetition_N, value_N / repetition_N)
    work_RV[row_N, id_N] = value_N - count_N * frequency_N - (count_N > 0) * presence_N


def _apply_bias(work_RV: Tensor, states: Sequence[SamplingState]) -> None:
    for row, state in enumerate(states):
        if state.params.logit_bias:
            bias_ids, bias_values = state.bias()
            known = (bias_ids >= 0) & (bias_ids < work_RV.shape[1])
            ids = torch.from_numpy(bias_ids[known]).to(work_RV.device)
            work_RV[row, ids] += torch.from_numpy(bias_values[known]).to(work_RV.device, torch.float32)


def _apply_suppression(work_RV: Tensor, states: Sequence[SamplingState]) -> None:
    """Rows with a mask are left out: there the mask knows whether a suppressed token is the only one left."""
    free = [(row, state.suppressed_ids) for row, state in enumerate(states) if state.mask is None]
    pairs = [(row, token_id) for row, suppressed_ids in free for token_id in suppressed_ids if 0 <= token_id < work_RV.shape[1]]
    if pairs:
        row_N, id_N = torch.tensor(pairs, device=work_RV.device).unbind(-1)
        work_RV[row_N, id_N] = -math.inf


def _apply_masks(work_RV: Tensor, states: Sequence[SamplingState]) -> None:
    """Only rows with a mask are touched."""
    rows = [row for row, state in enumerate(states) if state.mask is not None]
    if work_RV.device.type == "cpu":
        work = work_RV.numpy()
        for row in rows:
            mask_logits(work[row], states[row].allowed_words(), work[row])
    elif rows:
        words_NW = torch.from_numpy(np.stack([states[row].allowed_words() for row in rows])).to(work_RV.device)
        work_RV[rows] = work_RV[rows].masked_fill(forbidden_tokens(words_NW, work_RV.shape[1]), -math.inf)


def forbidden_tokens(words_NW: Tensor, vocab_size: int) -> Tensor:
    """Bools [N, V] on the words' device, True for tokens without a bit."""
    bits_NW32 = words_NW[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words_NW.device)
    return (bits_NW32 & 1).flatten(1)[:, :vocab_size] == 0


def _draw(work_SV: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Token ids [S] by inverse CDF over what the filters leave. Consumes `work_SV`; each row has a finite maximum."""
    probs_SV = filtered_probs(work_SV, states)
    draw_S = uniforms([state.seed for state in states], [state.choice for state in states], [state.position for state in states])
    return inverse_cdf(probs_SV, torch.from_numpy(draw_S).to(probs_SV.device))


def inverse_cdf(probs_SV: Tensor, draw_S: Tensor) -> Tensor:
    """The first id of each row whose cumulated probability exceeds `draw_S` (float64, in [0, 1)) times the row's total.

    Rows need not sum to 1; a token with probability zero is never returned. The search has two levels, spans of ids and then
    ids: float32 sums of a span are exact enough, float32 sums of a row would lose rare tokens, and float64 sums over the whole
    row cost ten times as much.
    """
    num_rows, vocab_size = probs_SV.shape
    padded_SV = torch.nn.functional.pad(probs_SV, (0, -vocab_size % _SPAN)) if vocab_size % _SPAN else probs_SV
    spans_SBW = padded_SV.view(num_rows, -1, _SPAN)
    sums_SB = spans_SBW.sum(-1).double()
    span_S, into_S = _find(sums_SB, draw_S * sums_SB.cumsum(-1)[:, -1])
    span_SW = spans_SBW[torch.arange(num_rows, device=probs_SV.device), span_S].double()
    within_S, _ = _find(span_SW, into_S)
    return span_S * _SPAN + within_S


def _find(weights_SN: Tensor, target_S: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first entry whose cumulated weight exceeds the target, and how far into that entry the target reaches.

    A target that rounding moved to the total or past it gives the last entry above zero.
    """
    sums_SN = weights_SN.cumsum(-1)
    total_S = sums_SN[:, -1]
    target_S = torch.minimum(target_S, total_S.nextafter(torch.zeros_like(total_S)))
    index_S1 = torch.searchsorted(sums_SN, target_S[:, None], right=True)
    before_S = (sums_SN.gather(-1, index_S1) - weights_SN.gather(-1, index_S1))[:, 0]
    return index_S1[:, 0], (target_S - before_S).clamp(min=0)


def filtered_probs(work_SV: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Probabilities [S, V] after temperature, top_k, top_p and min_p: zero for dropped tokens, not renormalised at the end.

    Consumes `work_SV`. Tokens that tie with the last kept one are kept too, as in transformers' top_k, so that the
    result does not depend on sort order. At least the most probable token stays.
    """
    vocab_size = work_SV.shape[1]
    work_SV -= work_SV.amax(-1, keepdim=True)  # before the division, so that a tiny temperature cannot overflow
    _keep_top_k(work_SV, [min(state.params.top_k or vocab_size, vocab_size) for state in states])
    temperatures = [min(max(state.params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE) for state in states]
    work_SV /= torch.tensor(temperatures, device=work_SV.device, dtype=torch.float32)[:, None]
    probs_SV = work_SV.softmax(-1)
    least = _top_p_thresholds(probs_SV, [state.params.top_p for state in states])
    min_p_S = torch.tensor([state.params.min_p for state in states], device=work_SV.device, dtype=torch.float32)
    if any(state.params.min_p > 0 for state in states):
        scaled_S = min_p_S * probs_SV.amax(-1)
        least = scaled_S if least is None else torch.maximum(least, scaled_S)
    if least is not None:
        probs_SV.masked_fill_(probs_SV < least[:, None], 0.0)
    return probs_SV


def _keep_top_k(work_SV: Tensor, top_k: list[int]) -> None:
    """Sets values below each row's k-th largest to -inf."""
    vocab_size = work_SV.shape[1]
    rows = [row for row, k in enumerate(top_k) if k < vocab_size]
    if not rows:
        return
    work_PV = _take(work_SV, rows)
    k_P = torch.tensor([top_k[row] for row in rows], device=work_SV.device)
    largest_PK = work_PV.topk(max(top_k[row] for row in rows), dim=-1).values
    kth_P = largest_PK.gather(-1, k_P[:, None] - 1)
    work_SV[rows] = work_PV.masked_fill(work_PV < kth_P, -math.inf)


def _top_p_thresholds(probs_SV: Tensor, top_p: list[float]) -> Tensor | None:
    """The smallest probability that each row keeps [S] (0 keeps all); None if no row filters. A row keeps the smallest set of
    most probable tokens with at least top_p of the mass (Holtzman et al., arXiv 1904.09751)."""
    rows = [row for row, p in enumerate(top_p) if p < 1]
    if not rows:
        return None
    least_S = torch.zeros(len(top_p), device=probs_SV.device, dtype=probs_SV.dtype)
    top_p_S = torch.tensor(top_p, device=probs_SV.device, dtype=torch.float64)
    vocab_size = probs_SV.shape[1]
    for num_candidates in (*(num for num in _NUM_CANDIDATES if num < vocab_size), vocab_size):
        # More candidates begin with the same numbers in the same order, so what a row keeps does not depend on their number.
        largest_PK = _take(probs_SV, rows).topk(num_candidates, dim=-1).values
        least_P, is_enough_P = _smallest_kept(largest_PK, top_p_S[rows])
        least_S[rows] = least_P
        rows = [row for row, is_enough in zip(rows, is_enough_P.tolist(), strict=True) if not is_enough]
        if not rows:
            break
    return least_S


def _smallest_kept(sorted_PK: Tensor, top_p_P: Tensor) -> tuple[Tensor, Tensor]:
    """For probabilities in descending order: the last one whose predecessors sum to less than top_p, and whether the sum of all
    reaches top_p."""
    cumulative_PK = sorted_PK.cumsum(-1, dtype=torch.float64)
    num_kept_P = 1 + (cumulative_PK[:, :-1] < top_p_P[:, None]).sum(-1)
    return sorted_PK.gather(-1, num_kept_P[:, None] - 1)[:, 0], cumulative_PK[:, -1] >= top_p_P


def _logprobs(logits_RV: Tensor, token_ids: list[int], wanted: list[int]) -> list[TokenLogprob]:
    """Log-softmax of the model's own logits (float32) for the chosen tokens, and each row's `wanted` best alternatives.

    Every row gets the same number of candidates, because that number decides which of several equal ones `topk` returns.
    """
    logprobs_RV = logits_RV.log_softmax(-1)
    chosen = logprobs_RV.gather(-1, torch.tensor(token_ids, device=logits_RV.device)[:, None])[:, 0].tolist()
    if any(wanted):
        best = logprobs_RV.topk(min(MAX_LOGPROBS, logprobs_RV.shape[1]), dim=-1)
        values, ids = best.values.tolist(), best.indices.tolist()
    else:
        values = ids = [[] for _ in token_ids]
    found: list[TokenLogprob] = []
    for row, (token_id, logprob) in enumerate(zip(token_ids, chosen, strict=True)):
        ranked = sorted(zip(ids[row], values[row], strict=True), key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(token_id=token_id, logprob=logprob, top=tuple(ranked[: wanted[row]])))
    return found
