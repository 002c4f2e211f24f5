"""Draws tokens through the compiled kernel: one call reads the logits in place, its threads share the rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from replicas.native.structs import check_structs
from replicas.native.thread_team import ThreadTeam
from replicas.sampling.philox import uniforms
from replicas.sampling.sampling_state import SamplingState

MIN_TEMPERATURE, MAX_TEMPERATURE = 2.0**-126, 2.0**126
"""Bounds that a float32 division can represent; beyond them a row is greedy or uniform anyway."""


class _Settings(ctypes.Structure):
    """Mirrors MantaDrawSettings in replicas/native/sampling.h, field by field."""

    _fields_ = [
        ("temperature", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("draw", ctypes.c_double),
    ]


class NativeDraw:
    """Temperature, top_k, top_p, min_p and the inverse CDF for many rows. The torch reference is in `replicas.sampling.sampler`."""

    def __init__(self, library: ctypes.CDLL, team: ThreadTeam | None = None) -> None:
        """Works on `team`; None makes one."""
        check_structs(library, MantaDrawSettings=_Settings)
        self._team = team or ThreadTeam(library)
        self._call = library.manta_draw
        self._argmax = library.manta_argmax

    def can_read(self, logits_RV: torch.Tensor) -> bool:
        return logits_RV.dtype == torch.float32 and logits_RV.device.type == "cpu" and logits_RV.stride(1) == 1

    def argmax(self, logits_RV: torch.Tensor, rows: Sequence[int]) -> list[int]:
        """For each of `rows`, the first id with the largest logit; -1 if a logit is NaN or the largest is infinite."""
        token_ids = (ctypes.c_int64 * len(rows))()
        self._argmax(
            ctypes.c_void_p(logits_RV.data_ptr()), ctypes.c_int64(logits_RV.stride(0)), ctypes.c_int64(logits_RV.shape[1]),
            (ctypes.c_int64 * len(rows))(*rows), ctypes.c_int64(len(rows)), token_ids,
            self._team.pointer,
        )  # fmt: skip
        return list(token_ids)

    def draw(self, logits_RV: torch.Tensor, rows: Sequence[int], states: Sequence[SamplingState]) -> list[int]:
        """A token for each of `rows`, whose `states` are in the same order; -1 if the row's largest logit is not finite."""
        vocab_size = logits_RV.shape[1]
        if not rows:
            return []
        draws = uniforms([state.seed for state in states], [state.choice for state in states], [state.position for state in states])
        settings = (_Settings * len(rows))(
            *(
                _Settings(
                    temperature=min(max(state.params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE),
                    min_p=state.params.min_p,
                    top_k=min(state.params.top_k or vocab_size, vocab_size),
                    top_p=state.params.top_p,
                    draw=draw,
                )
                for state, draw in zip(states, draws.tolist(), strict=True)
            )
        )
        token_ids = (ctypes.c_int64 * len(rows))()
        self._call(
            ctypes.c_void_p(logits_RV.data_ptr()), ctypes.c_int64(logits_RV.stride(0)), ctypes.c_int64(vocab_size),
            (ctypes.c_int64 * len(rows))(*rows), ctypes.c_int64(len(rows)), settings, token_ids,
            self._team.pointer,
        )  # fmt: skip
        return list(token_ids)
