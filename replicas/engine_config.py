"""Settings of one engine as the user gives them. Free of torch; "auto" and None are resolved once, at load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from replicas.speculation_config import SpeculationConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Role = Literal["unified", "prefill", "decode"]
ParallelBackend = Literal["auto", "gloo", "nccl"]
Runner = Literal["auto", "native", "transformers"]
Quantization = Literal["int8", "int4"]
KVTransfer = Literal["auto", "process-group", "object-store"]

LOOPBACK = "127.0.0.1"


MAX_KV_LEASE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the ranks of one replica work together. Only tensor parallelism is implemented."""

    backend: ParallelBackend = "auto"
    """Backend of torch.distributed; auto is nccl on CUDA and gloo on a CPU. With gloo, ranks may share a CUDA device."""
    init_deadline_s: float = 300.0
    """Seconds from the start of the ranks until all can take steps, loading included."""
    rank_deadline_s: float = 15.0
    """A rank that answers no ping for this many seconds, or holds up a step that long, is lost, and its replica ends."""
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.backend not in get_args(ParallelBackend):
            raise ValueError(f"backend must be one of {', '.join(get_args(ParallelBackend))}, got {self.backend!r}")
        for name in ("init_deadline_s", "rank_deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("pipeline_parallel_size", "data_parallel_size", "expert_parallel_size"):
            if getattr(self, name) != 1:
                raise ValueError(f"{name} above 1 is not supported by this version; use tensor_parallel_size, or more replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine's settings. The defaults suit a laptop's CPU and a single GPU."""

    model: str | None = None
    """Hugging Face id or folder; None is the default model, SmolLM2-135M-Instruct."""
    dtype: DType = "auto"
    """auto: the checkpoint's dtype if the device computes in it, else float32."""
    device: Device = "auto"
    max_model_len: int | None = None
    """Most tokens of prompt plus output; None takes the model's own limit."""
    max_num_seqs: int = 64
    """Most requests that run at once."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step. None measures the device at load and aims at `max_step_s` for a full step, and at `max_mixed_step_s`
    for a step in which requests decode."""
    max_step_s: float = 0.25
    """Target seconds of a full step. Ignored if `max_num_batched_tokens` is given."""
    max_mixed_step_s: float = 0.04
    """Target seconds of a step that decodes and computes prompts: the gap between two tokens of a stream. Such a step still computes at
    least a block of prompt tokens; prompts more urgent than every decoding request are not held back. Ignored if
    `max_num_batched_tokens` is given."""
    max_urgent_share: float = 0.8
    """Largest share of the work for which streams step aside while prompts of more urgent priority are computed, below 1. They keep
    their KV. 0: they never do, and every step decodes all of them."""
    max_urgent_pause_s: float = 1.0
    """Longest time for which a stream steps aside; then the next step gives it a token, whatever its share."""
    block_size: int = 16
    """Tokens in a KV block."""
    kv_cache_bytes: int | None = None
    """Bytes of KV. None takes a share of the free memory at start on a CPU, and on CUDA what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that weights, activations and KV may use together (CUDA)."""
    enable_prefix_caching: bool = True
    runner: Runner = "auto"
    """auto: native (a step is one call into compiled code) if CPU, compiler and architecture allow it, else transformers' modules."""
    quantization: Quantization | None = None
    """Integer type of all linear weights, in groups of 32 inputs; None keeps `dtype`. Needs the native runner. Embedding and KV stay in
    `dtype`."""
    quantized_cache_bytes: int = 32 << 30
    """Most bytes of quantized weights kept on disk, all models together; the least recently used are deleted first. 0 keeps none."""
    round_activations: bool = True
    """Whether the native runner rounds activations: to bfloat16 before products with bfloat16 weights or KV, on CPUs that multiply
    bfloat16 (avx512_bf16), and to 16-bit integers before products with quantized weights, on CPUs that multiply bytes (avx512_vnni).
    False, or `dtype: float32`, keeps them float32, which is slower."""
    attention_backend: str = "auto"
    """Attention of the transformers runner: auto, reference, native or varlen_cuda."""
    cuda_graphs: bool = False
    """Whether decode steps are replayed as CUDA graphs, recorded at load for up to `max_num_seqs` rows. If they cannot be recorded (a
    CPU, several ranks, an attention backend other than varlen_cuda, a model that reads device values in a step), a warning says why."""
    num_threads: int | None = None
    """Computing threads. None takes the cores that this process may use, by its CPU mask and the CPU quota of its cgroup (rounded to the
    nearest core); replicas on one machine share them."""
    trust_remote_code: bool = False
    weights_version: str = ""
    """Part of block keys and of the KV fingerprint: KV of different versions is never mixed."""
    role: Role = "unified"
    """unified computes all of its requests itself. prefill and decode hand KV to each other; both can compute prefills and decodes."""
    kv_lease_s: float = 30.0
    """Seconds that offered KV is kept without renewal by its reader; then its blocks are freed."""
    kv_transfer: KVTransfer = "auto"
    """Transport of KV between replicas. auto takes the first that works for a pair: process groups (NCCL between CUDA devices, else
    Gloo), then Ray's object store, which exists only under Ray Serve."""
    transfer_host: str = LOOPBACK
    """Address on which the replica's transfer server listens, and at which other replicas reach it. Under Ray Serve the default stands
    for the address of the replica's node."""
    tensor_parallel_size: int = 1
    """Number of ranks, each with a part of the model: GPUs, or processes that share the cores of a CPU. `kv_cache_bytes`,
    `gpu_memory_utilization` and `num_threads` are per rank."""
    parallel: ParallelConfig = ParallelConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    """Drafts that the model verifies several at a time. Off by default."""

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "kv_cache_bytes",
            "num_threads",
            "tensor_parallel_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.max_model_len == 1:
            raise ValueError("max_model_len must be at least 2: a prompt token and one to generate")
        if self.role not in get_args(Role):
            raise ValueError(f"role must be one of {', '.join(get_args(Role))}, got {self.role!r}")
        if self.quantization is not None and self.quantization not in get_args(Quantization):
            raise ValueError(f"quantization must be {' or '.join(get_args(Quantization))}, or left out, got {self.quantization!r}")
        if self.quantization is not None and self.runner == "transformers":
            raise ValueError(f"quantization {self.quantization!r} needs the native runner; leave runner at 'auto', or quantization out")
        if self.quantized_cache_bytes < 0:
            raise ValueError(f"quantized_cache_bytes must be at least 0, got {self.quantized_cache_bytes}")
        if not 0 < self.kv_lease_s <= MAX_KV_LEASE_S:
            raise ValueError(f"kv_lease_s must be above 0 and at most {MAX_KV_LEASE_S:g}, got {self.kv_lease_s}")
        if self.transfer_host in ("", "0.0.0.0", "::"):
            raise ValueError(f"transfer_host must be an address under which other replicas reach this one, got {self.transfer_host!r}")
        self._check_steps()
        if self.kv_transfer not in get_args(KVTransfer):
            raise ValueError(f"kv_transfer must be one of {', '.join(get_args(KVTransfer))}, got {self.kv_transfer!r}")

    def _check_steps(self) -> None:
        for name in ("max_step_s", "max_mixed_step_s", "max_urgent_pause_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if not 0 <= self.max_urgent_share < 1:
            raise ValueError(f"max_urgent_share must be at least 0 and below 1, got {self.max_urgent_share}")
