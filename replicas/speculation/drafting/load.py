"""Loads what drafts with weights: heads, draft models, twins. In three steps, as the target is loaded: files first, which decide how much
memory is left for KV; then what needs the target's weights; then what needs its runner."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from kvcache.spec import KVGroupSpec
from kvcache.tensors import KVTensors, bytes_per_token
from replicas.attention.backend import AttentionBackend
from replicas.attention.native import NativeAttention
from replicas.attention.selection import select_backend
from replicas.engine_config import EngineConfig
from replicas.linear.packed_cache import PackedCache, content_key
from replicas.model.loader import LoadedModel, ModelChoice, choose_model, load_model
from replicas.model.native_decoder import LAYOUT, NativeDecoder, NativeMismatch
from replicas.model.rank_model import RankModel
from replicas.model.runner import ModelRunner, kv_groups, probe_layers
from replicas.native.packing import Element
from replicas.sampling.native_draw import NativeDraw
from replicas.sampling.sampler import Sampler
from replicas.sharding.collectives import Alone
from replicas.speculation.drafting.draft_model import DraftModelProposer
from replicas.speculation.drafting.eagle import EagleProposer
from replicas.speculation.drafting.medusa import MedusaProposer
from replicas.speculation.drafting.token_map import ForeignVocabulary, TokenMap
from replicas.speculation.drafting.twin import TwinProposer
from replicas.speculation.heads.eagle_files import EagleWeights, read_eagle
from replicas.speculation.heads.eagle_layer import EagleLayer, kv_group
from replicas.speculation.heads.eagle_settings import is_eagle
from replicas.speculation.heads.head_files import read_config
from replicas.speculation.heads.medusa_files import MedusaWeights, is_medusa, read_medusa
from replicas.speculation.heads.medusa_heads import MedusaHeads
from replicas.speculation.heads.target import HeadTarget, SharedOutput, head_target
from replicas.speculation.proposer import Proposer
from replicas.speculation_config import SpeculationConfig, SpeculationMethod
from replicas.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_ELEMENTS = {"int8": Element.INT8, "int4": Element.INT4}


class Drafting(ABC):
    """What a drafting method has loaded before the target's KV is sized."""

    kv_bytes_per_token: int = 0
    """KV that the method keeps beside the target's, for every slot of the pool."""
    later_bytes: int = 0
    """Memory that it takes once KV is sized."""

    @abstractmethod
    def proposer(self, rank: RankModel) -> Proposer:
        """Called before the target's runner takes over its weights. Raises ValueError with one line that names the fix."""

    def bind(self, runner: ModelRunner) -> None:  # noqa: B027 - most methods need nothing of it
        """Called with the target's runner."""


def read_drafting(config: EngineConfig, loaded: LoadedModel) -> Drafting | None:
    """None for methods without weights. Raises ValueError with one line that names the fix."""
    speculation = config.speculation
    method = method_of_model(speculation)
    if method == "medusa":
        return _Medusa(model_of(speculation), loaded)
    if method == "eagle":
        return _Eagle(model_of(speculation), loaded)
    if method == "draft_model":
        return _DraftModel(config, loaded)
    if method == "twin":
        return _Twin(config, loaded)
    return None


def method_of_model(speculation: SpeculationConfig) -> SpeculationMethod:
    """The method, with "auto" resolved by the files of `model` if there is one."""
    if speculation.method != "auto" or speculation.model is None:
        return speculation.method
    head = read_config(speculation.model)
    if is_medusa(head):
        return "medusa"
    is_one_layer = head.get("num_hidden_layers") == 1  # EAGLE-1 heads have the plain configuration of a llama model
    return "eagle" if is_eagle(head) or is_one_layer else "draft_model"


def model_of(speculation: SpeculationConfig) -> str:
    assert speculation.model is not None, "the configuration demands a model for this method"
    return str(Path(speculation.model).expanduser()) if speculation.model.startswith("~") else speculation.model


def _sampler(loaded: LoadedModel, rank: RankModel) -> Sampler:
    """Draws as the target's own."""
    return Sampler(loaded.vocab_size, None if loaded.native_library is None else NativeDraw(loaded.native_library, rank.team))


class _Head(Drafting):
    """What Medusa and EAGLE have in common."""

    def __init__(self, loaded: LoadedModel, weights: MedusaWeights | EagleWeights) -> None:
        self._loaded = loaded
        self._output = SharedOutput()
        if loaded.device.type == "cuda":  # on a CPU the weights, which were read, are counted already: they are only packed
            self.later_bytes = _num_values(weights) * loaded.dtype.itemsize

    def bind(self, runner: ModelRunner) -> None:
        self._output.bind(runner)

    def _target(self, rank: RankModel) -> HeadTarget:
        return head_target(self._loaded, self._output, rank.team)


class _Medusa(_Head):
    def __init__(self, source: str, loaded: LoadedModel) -> None:
        text = loaded.choice.hf_config.get_text_config(decoder=True)
        self._weights = read_medusa(source, hidden_size=int(text.hidden_size), vocab_size=loaded.vocab_size)
        super().__init__(loaded, self._weights)

    def proposer(self, rank: RankModel) -> Proposer:
        target = self._target(rank)
        heads = MedusaHeads(self._weights, target)
        logger.info("speculation: %d Medusa heads, %.1f MiB", heads.num_heads, heads.num_bytes / 2**20)
        return MedusaProposer(heads, target, _sampler(self._loaded, rank))


class _Eagle(_Head):
    def __init__(self, source: str, loaded: LoadedModel) -> None:
        text = loaded.choice.hf_config.get_text_config(decoder=True)
        self._weights = read_eagle(
            source, hidden_size=int(text.hidden_size), vocab_size=loaded.vocab_size, num_layers=int(text.num_hidden_layers)
        )
        super().__init__(loaded, self._weights)
        self.kv_bytes_per_token = bytes_per_token([kv_group(self._weights.settings)], loaded.dtype)

    def proposer(self, rank: RankModel) -> Proposer:
        layer = EagleLayer(self._weights, self._target(rank))
        backend: AttentionBackend
        if self._loaded.native_library is not None:
            backend = NativeAttention(self._loaded.native_library, rank.team)
        else:
            backend = select_backend("auto", [layer.call], rank.kv.dtype, rank.kv.device, rank.kv.block_size)
        kv = _shadow([kv_group(layer.settings)], backend, rank, self._loaded)
        logger.info(
            "speculation: EAGLE-%s head over hidden states %s, %.1f MiB, %d bytes of KV a token",
            "3" if layer.settings.is_eagle3 else "1", layer.settings.layer_ids, layer.num_bytes / 2**20, self.kv_bytes_per_token,
        )  # fmt: skip
        return EagleProposer(layer, kv, backend, _sampler(self._loaded, rank))


def _num_values(weights: object) -> int:
    """Elements of all tensors in dataclasses and tuples."""
    if isinstance(weights, Tensor):
        return weights.numel()
    if is_dataclass(weights):
        return sum(_num_values(getattr(weights, field.name)) for field in fields(weights))
    return sum(_num_values(one) for one in weights) if isinstance(weights, tuple) else 0


def check_twin(config: EngineConfig, *, is_native: bool) -> None:
    """Raises ValueError if the target cannot draft for itself."""
    twin = config.speculation.twin
    if not is_native:
        raise ValueError("speculation method 'twin' needs the native runner, which cannot serve this model here; use another method")
    if config.tensor_parallel_size > 1:
        raise ValueError("speculation method 'twin' needs tensor_parallel_size 1; use 'draft_model', or a head, with several ranks")
    if config.quantization is not None and _ELEMENTS[config.quantization].bits <= _ELEMENTS[twin].bits:
        raise ValueError(
            f"speculation twin {twin!r} is no faster than the target, whose weights are {config.quantization}; leave quantization out, "
            "or use another method"
        )


def twin_bytes(config: EngineConfig, model: PreTrainedModel) -> int:
    """Of the twin's weights and the scales of their groups, about."""
    num_weights: int = sum(parameter.numel() for parameter in model.parameters())
    return num_weights * (_ELEMENTS[config.speculation.twin].bits + 1) // 8


class _Twin(Drafting):
    """Its output layer is int8: errors there reach every logit."""

    def __init__(self, config: EngineConfig, target: LoadedModel) -> None:
        check_twin(config, is_native=target.native_library is not None)
        self._config, self._loaded, self._quantization = config, target, config.speculation.twin
        self.later_bytes = twin_bytes(config, target.model)

    def proposer(self, rank: RankModel) -> Proposer:
        loaded = self._loaded
        assert loaded.native_library is not None
        cache = PackedCache(content_key(loaded.model, f"{self._quantization}-twin"), self._config.quantized_cache_bytes)
        twin = NativeDecoder(
            loaded.native_library, loaded.model, rank.calls, rank.kv, quantization=self._quantization, output_quantization="int8",
            cache=cache, team=rank.team, keeps_model=True,
        )  # fmt: skip
        logger.info("speculation: the target's %s twin, about %.0f MiB", self._quantization, self.later_bytes / 2**20)
        return TwinProposer(twin, rank.kv.block_size, _sampler(loaded, rank))


def choose_draft_model(config: EngineConfig) -> tuple[EngineConfig, ModelChoice]:
    """How the draft model of `config` is loaded. Raises ValueError with one line that names the fix."""
    own = replace(
        config, model=model_of(config.speculation), tensor_parallel_size=1, speculation=SpeculationConfig(), kv_cache_bytes=None,
        max_model_len=None, role="unified", cuda_graphs=False, runner="transformers" if config.runner == "transformers" else "auto",
    )  # fmt: skip
    try:
        return own, choose_model(own)
    except ValueError:
        if own.quantization is None:
            raise
    own = replace(own, quantization=None)  # that may be the reason: the native runner knows fewer families
    return own, choose_model(own)


def token_map(target: ModelChoice, draft: ModelChoice) -> TokenMap:
    """Raises ValueError if the draft model has too few of the target's tokens."""
    vocabularies = [Tokenizer.load(choice.source, choice.trust_remote_code) for choice in (target, draft)]
    sizes = [int(choice.hf_config.get_text_config(decoder=True).vocab_size) for choice in (target, draft)]
    try:
        return TokenMap.between(vocabularies[0], sizes[0], vocabularies[1], sizes[1])
    except ForeignVocabulary as error:
        raise ValueError(f"speculation model {draft.source}: {error}") from error


class _DraftModel(Drafting):
    def __init__(self, config: EngineConfig, target: LoadedModel) -> None:
        self._config, choice = choose_draft_model(config)
        self._target = target
        self._tokens = token_map(target.choice, choice)
        self._loaded = load_model(choice, Alone())
        self._calls = probe_layers(self._loaded.model)
        self.kv_bytes_per_token = bytes_per_token(kv_groups(self._calls), self._loaded.dtype)

    def proposer(self, rank: RankModel) -> Proposer:
        loaded, config = self._loaded, self._config
        backend = None
        if loaded.native_library is None:
            backend = select_backend("auto", self._calls.values(), loaded.dtype, loaded.device, config.block_size)
        kv = _shadow(kv_groups(self._calls), backend, rank, loaded)
        own = RankModel(
            loaded=loaded, calls=self._calls, backend=backend, size=rank.size, kv=kv, group=Alone(), team=rank.team, capture=None
        )  # fmt: skip
        try:
            runner = own.runner(config)
        except NativeMismatch as error:
            raise ValueError(f"speculation model {loaded.source} cannot draft: {error}; use another") from error
        tokens = self._tokens
        ids = "the same" if tokens.is_identity else "other"
        logger.info(
            "speculation: draft model %s with %d of the target's %d tokens, under %s ids, %d bytes of KV a token",
            loaded.source, tokens.token_ids_C.shape[0], self._target.vocab_size, ids, self.kv_bytes_per_token,
        )  # fmt: skip
        return DraftModelProposer(runner, kv.block_size, _sampler(self._target, rank), tokens, loaded.max_positions)


def _shadow(
    groups: list[KVGroupSpec] | tuple[KVGroupSpec, ...], backend: AttentionBackend | None, rank: RankModel, loaded: LoadedModel
) -> KVTensors:
    """KV of a drafter, with the block ids of the target's."""
    return KVTensors(
        groups,
        layout=LAYOUT if backend is None else backend.layout,
        num_blocks=rank.kv.num_blocks,
        block_size=rank.kv.block_size,
        dtype=loaded.dtype,
        device=loaded.device,
    )
