"""From the args of `ray_config.yaml` to frozen configurations, and the one reader of the environment.

Models of the args are made from the frozen classes themselves, so that a field, its default and its meaning are written
once. Every fault becomes one line that names the key and what is allowed.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from cluster.settings.gateway_config import GatewayConfig
from cluster.settings.latency_targets import LatencyTarget, check_targets
from cluster.settings.pool_config import Mode, PlacementStrategy, PoolConfig, ResolvedPool, resolved_pool
from cluster.settings.structured_output import StructuredOutputConfig
from cluster.settings.vllm_spellings import in_own_words
from replicas.engine_config import EngineConfig, Role
from replicas.model.default_model import DEFAULT_MODEL_NAME
from router.config import RouterConfig

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")
MAX_DRAIN_S = 86_400.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One served model."""

    name: str = DEFAULT_MODEL_NAME
    """Clients put it into `model`."""
    mode: Mode = "unified"
    """unified: every replica does all of a request. disaggregated: a pool for prefill and one for decode, KV between them."""
    num_replicas: int | None = None
    """In mode unified; one when left out. In mode disaggregated each pool has its own."""
    num_cpus: float = 1.0
    """CPUs that Ray reserves for each replica, or for each rank of one that spreads over several. The engine's threads are
    `engine.num_threads`."""
    num_gpus: float = 0.0
    """GPUs that Ray reserves for each replica, or for each of its ranks."""
    placement_strategy: PlacementStrategy = "STRICT_PACK"
    """Where the ranks of one replica go: STRICT_PACK on one node, PACK on as few as possible, SPREAD and STRICT_SPREAD apart."""
    drain_s: float = 30.0
    """How long a replica that is stopped (redeploy, scale-down, node drain) lets its requests end by themselves. The rest
    then continues on another replica."""
    engine: EngineConfig = EngineConfig()
    targets: tuple[LatencyTarget, ...] = ()
    """How fast requests should be answered, by priority, e.g. [{priority: 0, ttft_s: 2.0, tpot_s: 0.1}, {priority: 10, ttft_s: 60}]: an
    entry counts for its priority and less urgent ones, up to the next entry. Clients may lower theirs by `X-TTFT-Target-Ms` and
    `X-TPOT-Target-Ms`. Empty: none has a target."""
    structured_output: StructuredOutputConfig = StructuredOutputConfig()
    """How answers follow JSON schemas and other grammars."""
    prefill: PoolConfig | None = None
    """In mode disaggregated: the replicas that compute prompts; one when left out."""
    decode: PoolConfig | None = None
    """In mode disaggregated: the replicas that generate; one when left out."""

    def __post_init__(self) -> None:
        if not MODEL_NAME.fullmatch(self.name):
            raise ValueError(f"name must be letters, digits and ._:/- (at most 200), got {self.name!r}")
        if not 0 <= self.drain_s <= MAX_DRAIN_S:
            raise ValueError(f"drain_s must be from 0 to {MAX_DRAIN_S:g}, got {self.drain_s}")
        check_targets(self.targets)
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        if self.engine.role != "unified":
            raise ValueError("engine.role is that of the pool; leave it out, and set mode: disaggregated for pools of both roles")
        if self.mode == "unified":
            for name in ("prefill", "decode"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is a pool of mode disaggregated; set mode: disaggregated, or leave it out")
        elif self.num_replicas is not None:
            raise ValueError("num_replicas is of mode unified; set prefill.num_replicas and decode.num_replicas instead")
        engines = [pool.engine for pool in self.pools]
        if self.engine.dtype == "auto" and len({(engine.device, engine.runner) for engine in engines}) > 1:
            raise ValueError("engine.dtype must be named when the pools differ in device or runner: auto may choose another for each")

    @property
    def pools(self) -> tuple[ResolvedPool, ...]:
        """One of role unified, or one of role prefill and one of role decode."""
        if self.mode == "unified":
            unified = ResolvedPool(
                role="unified",
                num_replicas=1 if self.num_replicas is None else self.num_replicas,
                num_cpus=self.num_cpus,
                num_gpus=self.num_gpus,
                placement_strategy=self.placement_strategy,
                engine=self.engine,
            )
            return (unified,)
        return self._resolved_pool("prefill", self.prefill), self._resolved_pool("decode", self.decode)

    def _resolved_pool(self, role: Role, config: PoolConfig | None) -> ResolvedPool:
        return resolved_pool(
            role,
            config or PoolConfig(),
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus,
            placement_strategy=self.placement_strategy,
            engine=self.engine,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Everything that `build` needs."""

    models: tuple[ModelConfig, ...]
    """At least one; names are unique."""
    router: RouterConfig = RouterConfig()
    gateway: GatewayConfig = GatewayConfig()

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise ValueError("models must name at least one model")
        if len(set(names)) != len(names):
            raise ValueError(f"models must have different names, got {', '.join(names)}")


class ConfigError(ValueError):
    """The args cannot be used; the message is one line that names the key and the fix."""


class _Args(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def read_config(args: Mapping[str, Any]) -> ClusterConfig:
    """The cluster that `args` (the `args:` of the Serve application) describe. Raises ConfigError."""
    try:
        args = in_own_words(args)
    except ValueError as error:
        raise ConfigError(f"args: {error}") from error
    try:
        parsed = _args_model(ClusterConfig).model_validate(args)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error
    try:
        config = _to_frozen(ClusterConfig, parsed, "")
    except ValueError as error:
        raise ConfigError(f"args: {error}") from error
    assert isinstance(config, ClusterConfig)
    for index, model in enumerate(config.models):
        _check_model_source(f"models[{index}].engine.model", model.engine.model)
    return config


def _check_model_source(key: str, source: str | None) -> None:
    """A folder must be there and hold a model; anything else must look like a Hugging Face id."""
    if source is None:
        return
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"args: {key}: {source} has no config.json; name the folder that holds the model's config.json and weights")
    elif source.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(source):
        raise ConfigError(f"args: {key}: folder {source} does not exist; give an existing folder, a Hugging Face id, or leave it out")


def _args_model(config_class: type, *, is_partial: bool = False) -> type[_Args]:
    """A pydantic model with the fields, defaults and nested classes of a frozen dataclass; of a partial one every key may be
    left out, and what is said of it is the set of those that were given."""
    definitions: dict[str, Any] = {}
    for field in fields(config_class):
        hint = _args_type(_hints(config_class)[field.name], is_partial=is_partial)
        if is_partial:
            definitions[field.name] = (hint, None)
        elif field.default is MISSING and field.default_factory is MISSING:
            definitions[field.name] = (hint, ...)
        elif isinstance(hint, type) and issubclass(hint, _Args):
            definitions[field.name] = (hint, Field(default_factory=hint))
        elif field.default_factory is not MISSING:
            definitions[field.name] = (hint, Field(default_factory=field.default_factory))
        else:
            definitions[field.name] = (hint, field.default)
    return create_model(f"{config_class.__name__}Args", __base__=_Args, **definitions)


def _args_type(hint: Any, *, is_partial: bool) -> Any:
    """The type of a field with pydantic models in place of the frozen classes in it."""
    config_class = _config_class(hint)
    if config_class is None:
        return hint
    model = _args_model(config_class, is_partial=is_partial or get_origin(hint) is Annotated)
    if get_origin(hint) is tuple:
        return tuple[model, ...]  # type: ignore[valid-type]
    return model | None if get_origin(hint) is UnionType else model


def _config_class(hint: Any) -> type | None:
    """The frozen class that a field holds: alone, in a tuple, perhaps, or some keys of it."""
    if is_dataclass(hint) and isinstance(hint, type):
        return hint
    return next((found for part in get_args(hint) if (found := _config_class(part)) is not None), None)


def _hints(config_class: type) -> dict[str, Any]:
    return get_type_hints(config_class, include_extras=True)


def _to_frozen(config_class: type, parsed: BaseModel, path: str) -> object:
    """Builds the frozen class inside out. Raises ValueError whose message starts with the key's path."""
    values: dict[str, Any] = {}
    for field in fields(config_class):
        value = getattr(parsed, field.name)
        key = f"{path}{field.name}"
        hint = _hints(config_class)[field.name]
        nested = _config_class(hint)
        if isinstance(value, BaseModel) and get_origin(hint) is Annotated:
            value = _given(value)
        elif isinstance(value, BaseModel) and nested is not None:
            value = _to_frozen(nested, value, f"{key}.")
        elif isinstance(value, tuple) and nested is not None:
            value = tuple(_to_frozen(nested, item, f"{key}[{index}].") for index, item in enumerate(value))
        values[field.name] = value
    try:
        return config_class(**values)
    except ValueError as error:
        raise ValueError(f"{path}{error}") from error


def _given(parsed: BaseModel) -> dict[str, Any]:
    """The keys that were written, sections as mappings."""
    values = {key: getattr(parsed, key) for key in parsed.model_fields_set}
    return {key: _given(value) if isinstance(value, BaseModel) else value for key, value in values.items()}


def _explain(error: ValidationError) -> str:
    """One line for the first fault; a misspelt key is told its likely spelling."""
    details = error.errors(include_url=False, include_context=False)
    # A misspelt key comes first: it is often the reason why another one is missing.
    first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
    key = ""
    for part in first["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"])
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(known)}"
        return f"args: {key}: unknown key; {hint}{more}"
    if first["type"] == "missing":
        return f"args: {key}: missing; see ray_config.yaml for an example{more}"
    return f"args: {key}: {first['msg'][:1].lower()}{first['msg'][1:]}, got {str(first['input'])[:80]!r}{more}"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys that are allowed where the last part of `location` stands."""
    config_class: type = ClusterConfig
    for part in location[:-1]:
        if isinstance(part, str):
            config_class = _config_class(_hints(config_class)[part]) or config_class
    return [field.name for field in fields(config_class)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Every environment variable that Manta itself reads."""

    state_dir: Path
    """MANTA_STATE_DIR: what `make serve` remembers to undo, and Ray's files; ~/.cache/manta/local by default."""
    log_level: str
    """MANTA_LOG_LEVEL: of Manta's own loggers; INFO by default."""
    inherited: Mapping[str, str]
    """All of it, for processes that Manta starts."""


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Raises ConfigError for a level that logging does not know."""
    level = variables.get("MANTA_LOG_LEVEL", "INFO").upper()
    allowed = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level not in allowed:
        raise ConfigError(f"MANTA_LOG_LEVEL must be one of {', '.join(allowed)}, got {level!r}")
    state_dir = variables.get("MANTA_STATE_DIR") or "~/.cache/manta/local"
    return Environment(state_dir=Path(state_dir).expanduser(), log_level=level, inherited=dict(variables))
