"""Facts about the model of a loaded engine, for callers that build requests. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Constant while the replicas of one deployment live."""

    max_model_len: int
    """Most tokens of prompt plus output."""
    vocab_size: int
    """Token ids are below this."""
    block_size: int
    dtype: str
    tokenizer_source: str
    """Folder or Hugging Face id of the tokenizer."""
    runner: str = "transformers"
    """Runner of the steps: "native" or "transformers" (slower on a CPU)."""
    kernels: str = ""
    """Variant of the native runner's kernels, named for its instruction set; empty with another runner."""
    quantization: str = "none"
    """Integer type of the weights: "int8", "int4" or "none"."""
    tensor_parallel_size: int = 1
    weights_version: str = ""
    fingerprint: str = ""
    """Hash of the weights' names, shapes, first values and quantization. Replicas with equal ones may hand KV to each other."""
