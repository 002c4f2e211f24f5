"""Draws for rows that a mask alone changes, on a CPU. Shapes: M rows, V vocabulary, W words of 32 bits.

Copying a row and filling it where a mask forbids costs four times as much as what is done here: each byte of a mask becomes eight caps,
plus or minus infinity, and a row is the minimum of logits and caps. The time does not depend on how many tokens are allowed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.sampling.native_draw import NativeDraw
from replicas.sampling.sampling_state import SamplingState, Words

BAD_LOGITS = "the model produced logits that are not finite"
NONE_ALLOWED = "no token is allowed: every one is suppressed or masked"

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CAPS = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf)).astype(np.float32)
"""byte of a mask -> the caps of its eight tokens."""


def mask_logits(logits_V: npt.NDArray[np.float32], words_W: Words, out_V: npt.NDArray[np.float32]) -> None:
    """Writes the logits, minus infinity for tokens without a bit; NaN stays NaN. `out_V` may be `logits_V`."""
    caps = _CAPS.take(words_W.view(np.uint8), axis=0, mode="clip").reshape(-1)
    np.minimum(logits_V, caps[: len(logits_V)], out=out_V)


def masked_draw(
    native: NativeDraw, logits_RV: Tensor, rows: list[int], states: list[SamplingState], token_ids: list[int], errors: dict[int, str]
) -> None:
    """Draws for `rows` (their `states` in the same order) into `token_ids` and `errors`. Does not change the logits."""
    logits = logits_RV.numpy()
    work_MV = np.empty((len(rows), logits.shape[1]), dtype=np.float32)
    for place, (row, state) in enumerate(zip(rows, states, strict=True)):
        mask_logits(logits[row], state.allowed_words(), work_MV[place])
    work = torch.from_numpy(work_MV)
    greedy = [place for place, state in enumerate(states) if state.params.is_greedy]
    sampled = [place for place, state in enumerate(states) if not state.params.is_greedy]
    found = dict(zip(greedy, native.argmax(work, greedy) if greedy else (), strict=True))
    found |= dict(zip(sampled, native.draw(work, sampled, [states[place] for place in sampled]), strict=True))
    for place, token_id in found.items():
        row, mask = rows[place], states[place].mask
        token_ids[row] = max(token_id, 0)
        if mask is not None and mask.error is not None:  # what it allows then means nothing
            errors[row] = mask.error
        elif token_id < 0:
            errors[row] = NONE_ALLOWED if np.isneginf(work_MV[place]).all() else BAD_LOGITS
