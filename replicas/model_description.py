"""What a loaded engine says about its model, for whoever makes requests to it. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Facts that stay true for as long as the replicas of one deployment live."""

    max_model_len: int
    """Most tokens of prompt plus output."""
    vocab_size: int
    """Token ids are below this."""
    block_size: int
    dtype: str
    tokenizer_source: str
    """Folder or Hugging Face id of the tokenizer."""
    runner: str = "transformers"
    """What runs the steps: "native" or "transformers" (the slower one on a CPU)."""
    kernels: str = ""
    """The variant of the native runner's kernels, named for its instruction set; empty with another runner."""
    quantization: str = "none"
    """Of the weights: "int8", "int4" or "none"."""
    tensor_parallel_size: int = 1
    weights_version: str = ""
    fingerprint: str = ""
    """Of the weights and the shape of their KV: replicas with equal ones may hand KV to each other."""
