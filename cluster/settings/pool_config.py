"""The pools of one model: the number of replicas of each role, and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Annotated, Any, Literal, get_args

from replicas.engine_config import EngineConfig, Role

Mode = Literal["unified", "disaggregated"]
PlacementStrategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]
SomeEngineKeys = Annotated[Mapping[str, Any], EngineConfig]
"""A part of the engine's settings: name -> value."""
SAME_IN_BOTH_POOLS = (
    "model", "dtype", "max_model_len", "block_size", "quantization", "trust_remote_code", "weights_version", "kv_transfer",
)  # fmt: skip
"""Engine settings that determine a request's result, or whether KV can be handed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """One pool of a disaggregated model. Missing keys have the model's values."""

    num_replicas: int = 1
    num_cpus: float | None = None
    num_gpus: float | None = None
    placement_strategy: PlacementStrategy | None = None
    engine: SomeEngineKeys = field(default_factory=dict)
    """Engine settings in which this pool differs from the model, e.g. tensor_parallel_size, max_num_seqs, kv_cache_bytes."""

    def __post_init__(self) -> None:
        if "role" in self.engine:
            raise ValueError("engine.role is that of the pool; leave it out")
        for key in SAME_IN_BOTH_POOLS:
            if key in self.engine:
                raise ValueError(f"engine.{key} must be the same in both pools; set it in the model's own engine section instead")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPool:
    """The replicas of one role of one model, with every setting resolved."""

    role: Role
    num_replicas: int
    num_cpus: float
    num_gpus: float
    placement_strategy: PlacementStrategy
    engine: EngineConfig

    def __post_init__(self) -> None:
        if self.placement_strategy not in get_args(PlacementStrategy):
            raise ValueError(f"placement_strategy must be one of {', '.join(get_args(PlacementStrategy))}, got {self.placement_strategy!r}")
        if self.engine.tensor_parallel_size > 1 and not (self.num_cpus > 0 or self.num_gpus > 0):
            raise ValueError("num_cpus or num_gpus must be above 0 for each rank when engine.tensor_parallel_size is above 1")
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {self.num_replicas}")
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise ValueError(f"num_cpus and num_gpus must be at least 0, got {self.num_cpus} and {self.num_gpus}")


def resolved_pool(
    role: Role, config: PoolConfig, *, num_cpus: float, num_gpus: float, placement_strategy: PlacementStrategy, engine: EngineConfig
) -> ResolvedPool:
    """A model's settings with the changes of one pool. Raises ValueError with the pool's role and the key."""
    try:
        return ResolvedPool(
            role=role,
            num_replicas=config.num_replicas,
            num_cpus=num_cpus if config.num_cpus is None else config.num_cpus,
            num_gpus=num_gpus if config.num_gpus is None else config.num_gpus,
            placement_strategy=config.placement_strategy or placement_strategy,
            engine=_merged("engine", engine, {**config.engine, "role": role}),
        )
    except ValueError as error:
        raise ValueError(f"{role}.{error}") from error


def _merged(key: str, value: Any, change: Any) -> Any:
    """Applies a change: to a section key by key, to any other value as a whole. Raises ValueError that starts with the key."""
    if not (is_dataclass(value) and not isinstance(value, type) and isinstance(change, Mapping)):
        return change
    try:
        return replace(value, **{name: _merged(name, getattr(value, name), part) for name, part in change.items()})
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from error
