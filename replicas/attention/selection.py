"""Chooses the attention backend for a model on a device, and logs why."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from replicas.attention.backend import AttentionBackend, LayerCall
from replicas.attention.reference import ReferenceAttention

logger = logging.getLogger(__name__)

NAMES = ("auto", "reference", "native", "varlen_cuda")


def select_backend(name: str, calls: Iterable[LayerCall], dtype: torch.dtype, device: torch.device, block_size: int) -> AttentionBackend:
    """The backend for `name`, one of NAMES. If it cannot serve the model, "auto" falls back to the reference and logs a warning; any other
    name raises ValueError."""
    if name not in NAMES:
        raise ValueError(f"attention_backend must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "reference":
        return ReferenceAttention()
    wanted = name if name != "auto" else ("varlen_cuda" if device.type == "cuda" else "native")
    calls = list(calls)
    reason = _why_not(wanted, calls, dtype, device)
    if reason is None:
        try:
            backend = _create(wanted, calls, dtype, device, block_size)
        except RuntimeError as error:
            reason = str(error)
        else:
            logger.info("attention backend %s (KV layout %s)", backend.name, backend.layout.id)
            return backend
    if name != "auto":
        raise ValueError(f"attention_backend {name!r} cannot serve this model here: {reason}")
    logger.warning("attention backend reference, which is slow: %s cannot serve here (%s)", wanted, reason)
    return ReferenceAttention()


def _why_not(name: str, calls: list[LayerCall], dtype: torch.dtype, device: torch.device) -> str | None:
    short = str(dtype).removeprefix("torch.")
    if name == "native":
        if device.type != "cpu":
            return f"it runs on a CPU, not on {device.type}"
        return None if dtype in (torch.float32, torch.bfloat16) else f"it computes in float32 and bfloat16, not in {short}"
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {short}"
    if any(call.softcap is not None for call in calls):
        return "the model caps its attention scores"
    if any(call.k_dim != call.v_dim or call.k_dim > 256 for call in calls):
        return "it needs equal key and value dims of at most 256"
    return None


def _create(name: str, calls: list[LayerCall], dtype: torch.dtype, device: torch.device, block_size: int) -> AttentionBackend:
    """Raises RuntimeError with the reason if the machine lacks something that the backend needs."""
    if name == "native":
        from replicas.attention.native import NativeAttention
        from replicas.native.build import load_native_library

        return NativeAttention(load_native_library())
    from replicas.attention.varlen_cuda import VarlenCudaAttention

    backend = VarlenCudaAttention()
    for call in {(call.num_heads, call.num_kv_heads, call.k_dim): call for call in calls}.values():
        backend.try_out(call, dtype, device, block_size)
    return backend
