"""A rank's part of the model, its KV memory, and the runner over both. Every rank makes its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvcache.tensors import KVTensors, bytes_per_token
from replicas.attention.backend import AttentionBackend, LayerCall
from replicas.attention.selection import select_backend
from replicas.engine_config import EngineConfig
from replicas.linear.packed_cache import PackedCache, content_key
from replicas.model.cuda_graphs import CudaCapture, DecodeShape, GraphCapture, graphed
from replicas.model.kv_sizing import KVSize, cpu_budget_bytes, size_kv
from replicas.model.loader import LoadedModel
from replicas.model.native_decoder import LAYOUT, NativeDecoder
from replicas.model.native_shard import ShardedDecoder
from replicas.model.runner import ModelRunner, TransformersRunner, kv_groups, probe_layers
from replicas.native.thread_team import ThreadTeam
from replicas.sharding.collectives import RankGroup

logger = logging.getLogger(__name__)

MAX_BUDGET_TOKENS = 8192
"""Upper bound on the tokens of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """A loaded model with memory for its KV; it holds only this rank's weights and KV heads."""

    loaded: LoadedModel
    calls: Mapping[int, LayerCall]  # layer index -> call
    backend: AttentionBackend | None
    """None with the native runner, which has its own attention."""
    size: KVSize
    """The same on every rank."""
    kv: KVTensors
    group: RankGroup
    team: ThreadTeam | None
    """Threads of the native runner; None with another one."""
    capture: GraphCapture | None
    """Records decode steps as graphs; padding rows write to one block beyond `size`. None without CUDA graphs."""

    @classmethod
    def allocate(
        cls, config: EngineConfig, loaded: LoadedModel, group: RankGroup, *, other_bytes_per_token: int = 0, later_bytes: int = 0
    ) -> RankModel:
        """Must be called on all ranks together: they agree on the number of blocks. `other_bytes_per_token` is KV that somebody else keeps
        for the same blocks, `later_bytes` other memory that will be taken; both are left free. Raises ValueError with a one-line fix."""
        calls = probe_layers(loaded.model)
        backend = None
        if loaded.native_library is None:
            backend = select_backend(config.attention_backend, calls.values(), loaded.dtype, loaded.device, config.block_size)
        team = None if loaded.native_library is None else ThreadTeam(loaded.native_library)
        capture = choose_capture(config, loaded, backend)
        per_token = bytes_per_token(kv_groups(calls), loaded.dtype) + other_bytes_per_token
        size = _size(config, loaded, per_token, group, num_spare_blocks=0 if capture is None else 1, later_bytes=later_bytes)
        kv = KVTensors(
            kv_groups(calls),
            layout=LAYOUT if backend is None else backend.layout,
            num_blocks=size.num_blocks + (capture is not None),
            block_size=config.block_size,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        return cls(loaded=loaded, calls=calls, backend=backend, size=size, kv=kv, group=group, team=team, capture=capture)

    @property
    def kv_heads(self) -> range:
        """This rank's KV heads among the model's; where layers differ in their number, the heads that every layer has."""
        if self.loaded.part is not None:
            return self.loaded.part.kv_heads
        return range(min(group.num_kv_heads for group in self.kv.groups))

    def runner(self, config: EngineConfig) -> ModelRunner:
        """Makes the runner, which may take over (and free) the model's weights. Raises NativeMismatch when the native step cannot run the
        model."""
        loaded = self.loaded
        if self.backend is not None:
            return self._graphed(TransformersRunner(loaded.model, self.backend, self.kv), config.max_num_seqs)
        assert loaded.native_library is not None
        cache = None
        if (quantization := config.quantization) is not None:
            cache = PackedCache(content_key(loaded.model, quantization), config.quantized_cache_bytes)
        known = (loaded.native_library, loaded.model, self.calls, self.kv)
        if loaded.part is not None:
            return ShardedDecoder(*known, self.group, loaded.part.tokens, quantization=quantization, cache=cache, team=self.team)
        return NativeDecoder(*known, quantization=quantization, cache=cache, team=self.team)

    def _graphed(self, runner: ModelRunner, max_num_seqs: int) -> ModelRunner:
        if self.capture is None:
            return runner
        shape = DecodeShape(
            max_rows=max_num_seqs,
            max_context_len=self.size.max_model_len,
            block_size=self.kv.block_size,
            spare_block=self.size.num_blocks,
        )
        return graphed(runner, self.capture, shape, self.loaded.device)


def choose_capture(config: EngineConfig, loaded: LoadedModel, backend: AttentionBackend | None) -> GraphCapture | None:
    """The capture for `cuda_graphs`; None when it is off, or, with a warning, where graphs are impossible."""
    if not config.cuda_graphs:
        return None
    reason = None
    if loaded.device.type != "cuda":
        reason = f"they are of CUDA, and the device is {loaded.device.type}"
    elif config.tensor_parallel_size > 1:
        reason = "steps of several ranks cannot be recorded"
    elif backend is None or not backend.is_recordable:
        reason = f"attention {'native' if backend is None else backend.name} cannot be recorded"
    if reason is None:
        return CudaCapture(loaded.device)
    logger.warning("cuda_graphs has no effect here: %s", reason)
    return None


def _size(
    config: EngineConfig, loaded: LoadedModel, per_token: int, group: RankGroup, *, num_spare_blocks: int, later_bytes: int
) -> KVSize:
    """Fits blocks of `per_token` bytes a token into the budget, which `kv_cache_bytes` sets alone if it is given."""
    if loaded.device.type == "cuda":
        budget_bytes, reason = _cuda_budget_bytes(config, loaded, num_graphed_rows=config.max_num_seqs if num_spare_blocks else 0)
    else:
        budget_bytes, reason = cpu_budget_bytes(config.kv_cache_bytes, group.size)
    if later_bytes and config.kv_cache_bytes is None:
        budget_bytes = max(budget_bytes - later_bytes, 0)
        reason += f", less {later_bytes / 2**20:.0f} MiB for drafting"
    budget_bytes -= num_spare_blocks * per_token * config.block_size
    if group.size > 1:
        per_block = per_token * config.block_size
        budget_bytes = group.least(budget_bytes // per_block) * per_block
        reason += f", least of {group.size} ranks"
    return size_kv(
        budget_bytes=budget_bytes,
        budget_reason=reason,
        bytes_per_token=per_token,
        block_size=config.block_size,
        wanted_len=config.max_model_len,
        max_positions=loaded.max_positions,
        max_num_seqs=config.max_num_seqs,
    )


def _cuda_budget_bytes(config: EngineConfig, loaded: LoadedModel, *, num_graphed_rows: int) -> tuple[int, str]:
    """Bytes left by `gpu_memory_utilization` after weights, the activations of a full step, and the memory of graphs; and the reason."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes, "kv_cache_bytes"
    num_tokens = config.max_num_batched_tokens or MAX_BUDGET_TOKENS
    activations = _cuda_activation_bytes(loaded, num_tokens)
    if num_graphed_rows:
        num_logits = num_graphed_rows * loaded.vocab_size
        activations += _cuda_activation_bytes(loaded, num_graphed_rows) + num_logits * (loaded.dtype.itemsize + 2 * 4)
    free, total = torch.cuda.mem_get_info(loaded.device)
    budget = int(total * config.gpu_memory_utilization) - (total - free) - activations
    reason = f"gpu_memory_utilization {config.gpu_memory_utilization} of {total / 2**30:.1f} GiB after weights and activations"
    return max(budget, 0), reason


def _cuda_activation_bytes(loaded: LoadedModel, num_tokens: int) -> int:
    """Peak memory while `num_tokens` tokens are computed, beyond the memory in use before."""
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    probe_layers(loaded.model, num_tokens)
    return torch.cuda.max_memory_allocated(loaded.device) - before
