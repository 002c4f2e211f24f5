"""Loads any transformers causal language model, with dtype and device resolved."""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from replicas.engine_config import EngineConfig, Quantization
from replicas.linear.formats import stored_format
from replicas.model.default_model import prepare_default_model
from replicas.model.hub import require_on_hub
from replicas.model.native_decoder import why_not_native
from replicas.model_support import UnsupportedModel, check_supported
from replicas.native.build import NativeUnavailable, load_native_library, variant_of
from replicas.native.isa import cpu_flags, runnable
from replicas.native.packing import FLOAT_ELEMENTS
from replicas.sharding.collectives import RankGroup
from replicas.sharding.sharded_model import LoadedPart, load_part, load_whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model is loaded and how; every "auto" is resolved."""

    source: str
    """Folder or Hugging Face id, also of the tokenizer."""
    hf_config: Any
    trust_remote_code: bool
    dtype: torch.dtype
    device: torch.device
    native_library: ctypes.CDLL | None
    """The kernels that run this model's whole step; None when the native runner is not used."""
    is_quantized: bool
    """Whether the checkpoint was quantized by another tool."""

    def rounds_activations(self, quantization: Quantization | None) -> bool:
        """Whether the kernels round activations, given the checkpoint's weights or weights quantized at load."""
        if self.native_library is None or self.dtype is not torch.bfloat16:
            return False
        variant = variant_of(self.native_library)
        if quantization is not None:
            return variant.rounds_for_quantized
        return variant.rounds_activations if self.is_quantized else variant.rounds_for_bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device, or this rank's part of one, with the facts that the engine needs."""

    model: PreTrainedModel
    choice: ModelChoice
    vocab_size: int
    max_positions: int | None
    eos_token_ids: frozenset[int]
    part: LoadedPart | None
    """What this rank holds; None on a replica of one rank, which holds everything."""

    @property
    def source(self) -> str:
        return self.choice.source

    @property
    def dtype(self) -> torch.dtype:
        return self.choice.dtype

    @property
    def device(self) -> torch.device:
        return self.choice.device

    @property
    def native_library(self) -> ctypes.CDLL | None:
        return self.choice.native_library


def choose_model(config: EngineConfig) -> ModelChoice:
    """Resolves the configuration to one model. Raises UnsupportedModel for a model that cannot be served and ValueError for one that cannot
    be found or configured so; each message names the fix."""
    source = str(prepare_default_model()) if config.model is None else _expanded(config.model)
    hf_config = _load_config(source, config.trust_remote_code)
    check_supported(hf_config)
    is_quantized = stored_format(hf_config) is not None
    device = resolve_device(config.device)
    native_library = _native_library(config, hf_config, device)
    dtype, reason = resolve_dtype(config.dtype, getattr(hf_config, "dtype", None), device, is_native=native_library is not None)
    if native_library is not None and dtype not in FLOAT_ELEMENTS:
        if config.quantization is not None:
            raise ValueError(f"quantization {config.quantization!r} needs dtype float32 or bfloat16, not {config.dtype}")
        native_library = None
    if native_library is not None and (is_quantized or config.quantization is not None) and dtype is torch.float32:
        native_library = _native_library(replace(config, round_activations=False), hf_config, device)
    logger.info("dtype %s on %s: %s", str(dtype).removeprefix("torch."), device, reason)
    return ModelChoice(
        source=source,
        hf_config=hf_config,
        trust_remote_code=config.trust_remote_code,
        dtype=dtype,
        device=device,
        native_library=native_library,
        is_quantized=is_quantized,
    )


def load_model(choice: ModelChoice, group: RankGroup) -> LoadedModel:
    """The whole model when `group` is one rank, else this rank's part. Raises UnsupportedModel, and ValueError when the group's size
    cannot divide the model."""
    start_s = time.monotonic()
    part = None
    if group.size > 1:
        model, part = load_part(choice.hf_config, choice.source, choice.dtype, choice.device, group, choice.trust_remote_code)
    else:
        model = _load_whole(choice)
    logger.info("loaded %s (%s) in %.1f s", choice.source, type(model).__name__, time.monotonic() - start_s)
    text_config = choice.hf_config.get_text_config(decoder=True)
    return LoadedModel(
        model=model,
        choice=choice,
        vocab_size=int(text_config.vocab_size),
        max_positions=getattr(text_config, "max_position_embeddings", None),
        eos_token_ids=_eos_token_ids(model),
        part=part,
    )


def _load_whole(choice: ModelChoice) -> PreTrainedModel:
    if choice.is_quantized:
        return load_whole(choice.hf_config, choice.source, choice.dtype, choice.device, choice.trust_remote_code)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            choice.source, dtype=choice.dtype, trust_remote_code=choice.trust_remote_code, attn_implementation="eager"
        )
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedModel(f"cannot load {choice.source}: {_first_line(error)}") from error
    whole: PreTrainedModel = model.to(choice.device).eval().requires_grad_(False)
    return whole


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' but torch sees no CUDA device; use 'cpu' or 'auto', or install a CUDA build of torch")
    return torch.device(name)


def resolve_dtype(name: str, checkpoint: torch.dtype | None, device: torch.device, *, is_native: bool) -> tuple[torch.dtype, str]:
    """The dtype of weights and KV, and the reason for the log."""
    if name != "auto":
        return getattr(torch, name), "as configured"
    if checkpoint in (None, torch.float32):
        return torch.float32, "the checkpoint's own"
    assert checkpoint is not None
    short = str(checkpoint).removeprefix("torch.")
    if device.type == "cuda":
        if checkpoint is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            return torch.float16, "the checkpoint is bfloat16, which this GPU does not support"
        return checkpoint, "the checkpoint's own"
    if checkpoint is torch.bfloat16 and is_native:
        return checkpoint, "the checkpoint's own, and the native kernels support it"
    if checkpoint is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16, "the checkpoint's own, and this CPU supports it"
    return torch.float32, f"the checkpoint is {short}, which this CPU does not support"


def _native_library(config: EngineConfig, hf_config: Any, device: torch.device) -> ctypes.CDLL | None:
    """The native kernels, or None, with the reason logged, when they are not wanted or cannot run this model. Raises ValueError when
    the configuration demands them but they cannot."""
    if config.runner == "transformers":
        logger.info("runner transformers: as configured")
        return None
    reason = f"it runs on a CPU, not on {device.type}" if device.type != "cpu" else why_not_native(hf_config)
    if reason is None:
        try:
            may_round = config.round_activations
            library = load_native_library(variants=[isa for isa in runnable(cpu_flags()) if may_round or not isa.rounds_activations])
        except NativeUnavailable as error:
            reason = str(error)
        else:
            logger.info("runner native: each step is one call into kernels compiled for %s", variant_of(library).name)
            return library
    if config.quantization is not None:
        raise ValueError(
            f"quantization {config.quantization!r} needs the native runner, which cannot serve {hf_config.model_type!r} here: {reason}; "
            "leave quantization out"
        )
    if config.runner == "native":
        raise ValueError(f"runner 'native' cannot serve {hf_config.model_type!r} here: {reason}; use 'auto' or 'transformers'")
    logger.log(logging.WARNING if device.type == "cpu" else logging.INFO, "runner transformers: native cannot serve here (%s)", reason)
    return None


def _expanded(source: str) -> str:
    """Expands `~`: transformers would treat "~/model" as a Hugging Face id."""
    return str(Path(source).expanduser()) if source.startswith("~") else source


def _load_config(source: str, trust_remote_code: bool) -> Any:
    looks_like_path = source.startswith((".", "/"))
    if looks_like_path and not Path(source).is_dir():
        raise ValueError(f"model folder {source} does not exist; give a folder with config.json, or a Hugging Face id")
    if not Path(source).is_dir():
        require_on_hub(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot load model {source!r}: {_first_line(error)}; give a folder or a Hugging Face id that can be reached"
        ) from error


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    generation_config: GenerationConfig | None = model.generation_config
    for eos in (generation_config and generation_config.eos_token_id, model.config.get_text_config(decoder=True).eos_token_id):
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
