"""Settings of one engine as the user gives them. Free of torch; "auto" and None are resolved once, at load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Role = Literal["unified", "prefill", "decode"]
Backend = Literal["auto", "gloo", "nccl"]
Runner = Literal["auto", "native", "transformers"]
Quantization = Literal["int8", "int4"]
KVTransfer = Literal["auto", "process-group", "object-store"]

LOOPBACK = "127.0.0.1"


MAX_KV_LEASE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the ranks of one replica work together. Of the ways to divide a model only tensor parallelism is implemented."""

    backend: Backend = "auto"
    """Of torch.distributed: auto is nccl on CUDA and gloo on a CPU. gloo on CUDA lets ranks share a device."""
    init_deadline_s: float = 300.0
    """From the start of the ranks until all can take steps, loading included."""
    rank_deadline_s: float = 15.0
    """A rank without a sign of life for so long, or one that the others wait for in a step, takes its replica down."""
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {self.backend!r}")
        for name in ("init_deadline_s", "rank_deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("pipeline_parallel_size", "data_parallel_size", "expert_parallel_size"):
            if getattr(self, name) != 1:
                raise ValueError(f"{name} above 1 is not supported by this version; use tensor_parallel_size, or more replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine's settings. Defaults suit a laptop's CPU and a single GPU alike."""

    model: str | None = None
    """Hugging Face id or folder; None is the default model, SmolLM2-135M-Instruct."""
    dtype: DType = "auto"
    """auto: the checkpoint's dtype where the device computes in it, else float32."""
    device: Device = "auto"
    max_model_len: int | None = None
    """Most tokens of prompt plus output; None takes the model's own limit."""
    max_num_seqs: int = 64
    """Most requests in one step."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; None measures the device and aims at `max_step_s` for a full step, and at `max_mixed_step_s` for
    one in which requests decode."""
    max_step_s: float = 0.25
    max_mixed_step_s: float = 0.04
    """Aims at this gap between two tokens of a stream while prompts are computed beside it, of which each step takes a block at least;
    prompts more urgent than all that decodes are not held back. Without effect where `max_num_batched_tokens` is given."""
    block_size: int = 16
    kv_cache_bytes: int | None = None
    """Bytes of KV on a CPU; None takes a share of the memory that is free at start. On CUDA it overrides
    `gpu_memory_utilization`."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that weights, activations and KV may use together (CUDA)."""
    enable_prefix_caching: bool = True
    runner: Runner = "auto"
    """auto: the whole step as one native call where CPU, compiler and architecture allow, else transformers' modules."""
    quantization: Quantization | None = None
    """Weights of all linears as integers in groups of 32 inputs. Needs the native runner. Embedding and KV stay in `dtype`."""
    quantized_cache_bytes: int = 32 << 30
    """Most bytes of quantized weights kept on disk, of all models together; what was used longest ago goes first. 0 keeps none."""
    round_activations: bool = True
    """The native runner rounds what bfloat16 weights and KV multiply to bfloat16 too on CPUs that multiply it (avx512_bf16), and
    what quantized weights multiply to 16-bit integers on CPUs that multiply bytes (avx512_vnni). False keeps it float32, which takes
    longer; so does `dtype: float32`."""
    attention_backend: str = "auto"
    """auto, or the name of one backend in replicas/attention; for the transformers runner."""
    cuda_graphs: bool = False
    """Decode steps replayed as CUDA graphs, which are recorded at load for up to `max_num_seqs` rows. Where they cannot be (a CPU,
    several ranks, an attention backend other than varlen_cuda, a model that asks for values on the way) one warning says why."""
    num_threads: int | None = None
    """Threads that compute. None takes the cores that this process may use; replicas of one machine share them."""
    trust_remote_code: bool = False
    weights_version: str = ""
    role: Role = "unified"
    """prefill and decode can hand KV to each other, and still do each other's work; unified computes all of its own."""
    kv_lease_s: float = 30.0
    """How long KV waits for a decode replica that says nothing, before its blocks are taken back."""
    kv_transfer: KVTransfer = "auto"
    """How KV gets from one replica to another. auto: between any two the first that works, process groups (NCCL between CUDA
    devices, else Gloo) before Ray's object store, which only replicas that Ray serves have."""
    transfer_host: str = LOOPBACK
    """Address on which the replica's transfer server listens, and under which others reach it. On Ray the default stands for
    the address of the replica's node."""
    tensor_parallel_size: int = 1
    """Ranks that each hold a part of the model: GPUs, or processes that share the cores of a CPU. `kv_cache_bytes`,
    `gpu_memory_utilization` and `num_threads` are those of each rank."""
    parallel: ParallelConfig = ParallelConfig()

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
        for name in ("max_step_s", "max_mixed_step_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if self.kv_transfer not in get_args(KVTransfer):
            raise ValueError(f"kv_transfer must be one of {', '.join(get_args(KVTransfer))}, got {self.kv_transfer!r}")
