"""From an EngineConfig to a running Engine: load, probe, size, check. Logs every choice with its reason."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from kvcache.block_pool import BlockPool
from kvcache.tensors import bytes_per_token
from replicas.attention.backend import LayerCall
from replicas.engine.dry_run import DryRun, spread_token_ids
from replicas.engine.engine import Engine
from replicas.engine.grammar_requests import GrammarRequests
from replicas.engine_config import EngineConfig, Quantization
from replicas.grammar.compiler import GrammarCompiler
from replicas.grammar.llguidance_compiler import LLGuidanceCompiler
from replicas.handoff.other_ranks import NoOtherRanks
from replicas.handoff.wiring import HandoffWiring, RemoteWiring
from replicas.model.kv_sizing import KVSize
from replicas.model.loader import LoadedModel, ModelChoice, choose_model, load_model
from replicas.model.native_decoder import NativeMismatch
from replicas.model.rank_model import RankModel
from replicas.model.reference import checkpoint_values, streamed_logits
from replicas.model.runner import kv_groups, transformers_logits
from replicas.model_description import ModelDescription
from replicas.model_support import UnsupportedModel
from replicas.native.build import variant_of
from replicas.process.cpu_quota import num_usable_cores
from replicas.ranks.launcher import LocalLauncher, RankLauncher
from replicas.ranks.leader import Leader, threads_per_rank
from replicas.sampling.native_draw import NativeDraw
from replicas.sampling.sampler import Sampler
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.scheduler_config import SchedulerConfig
from replicas.sharding.collectives import Alone
from replicas.speculation.controller import Controller
from replicas.speculation.drafting.load import read_drafting
from replicas.speculation.load import load_proposers
from replicas.speculation.speculator import Speculator
from replicas.speculation.step_cost import StepCost
from replicas.speculation_config import SpeculationConfig
from replicas.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FINGERPRINT_VALUES = 16
"""First values of each parameter that the fingerprint hashes."""
MAX_SCORED_LOGITS = 1 << 25
"""Most logits of one step kept for prompt_logprobs, whatever the prompt and the budget: 128 MiB in float32."""
CHECK_TOKENS = 48
CHECK_TOLERANCE = {torch.float32: 1e-3}
"""Largest allowed mean difference from transformers' own logits, in standard deviations of the logits."""
CHECK_TOLERANCE_HALF = 0.15
CHECK_TOLERANCE_QUANTIZED: dict[Quantization, float] = {"int8": 0.15, "int4": 0.5}
"""The same for weights rounded by quantization. Unrelated logits differ by 1.1 deviations."""


def load_engine(config: EngineConfig, wiring: HandoffWiring | None = None, launcher: RankLauncher | None = None) -> Engine:
    """`wiring` connects handoffs; None chooses by role. `launcher` starts the other ranks of a replica; None starts processes on
    this machine. Raises ValueError with one line that names the fix."""
    wiring = wiring or (None if config.role == "unified" else RemoteWiring())
    if config.tensor_parallel_size > 1:
        config = replace(config, num_threads=threads_per_rank(config))
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif (num_cores := num_usable_cores()) < torch.get_num_threads():  # torch does not know the quota
        torch.set_num_threads(num_cores)
    choice = choose_model(config)
    if wiring is not None:
        wiring.check(config, choice.device)
    try:
        return _load(config, choice, wiring, launcher)
    except NativeMismatch as error:
        if choice.rounds_activations(config.quantization):
            logger.warning("loading again with activations that are not rounded: %s", error)
            return load_engine(replace(config, round_activations=False), wiring, launcher)
        if config.quantization is not None:
            raise ValueError(f"quantization {config.quantization!r} cannot serve {choice.source}: {error}; leave it out") from error
        if config.runner == "native":
            raise ValueError(f"runner 'native' cannot serve {choice.source}: {error}; use 'auto' or 'transformers'") from error
        logger.warning("loading again for the transformers runner: %s", error)
    config = replace(config, runner="transformers")
    return _load(config, choose_model(config), wiring, launcher)


def _load(config: EngineConfig, choice: ModelChoice, wiring: HandoffWiring | None, launcher: RankLauncher | None) -> Engine:
    if config.tensor_parallel_size == 1:
        return _assemble(config, load_model(choice, Alone()), wiring, None)
    leader = Leader(config, choice, launcher or LocalLauncher())
    try:
        loaded = load_model(choice, leader.group)
        logger.info("rank 0: %s", loaded.part)
        return _assemble(config, loaded, wiring, leader)
    except RuntimeError as error:
        reason = leader.explain(error)
        leader.close()
        raise reason from error
    except BaseException:
        leader.close()
        raise


def _assemble(config: EngineConfig, loaded: LoadedModel, wiring: HandoffWiring | None, leader: Leader | None) -> Engine:
    fingerprint = _fingerprint(loaded, config)
    drafting = read_drafting(config, loaded)
    rank = RankModel.allocate(
        config,
        loaded,
        Alone() if leader is None else leader.group,
        other_bytes_per_token=0 if drafting is None else drafting.kv_bytes_per_token,
        later_bytes=0 if drafting is None else drafting.later_bytes,
    )
    size = rank.size
    check = _SelfCheck(loaded, size.max_model_len, config.quantization)
    proposers = load_proposers(config.speculation, rank, drafting)
    runner = rank.runner(config)
    if drafting is not None:
        drafting.bind(runner)
    if leader is not None:
        runner = leader.lead(runner)
    dry_run = DryRun(runner, loaded, config.block_size, size)
    check.compare(dry_run, is_native=rank.backend is None)
    budget, mixed_budget = config.max_num_batched_tokens, None
    if budget is None:
        budget, mixed_budget = dry_run.budgets_for(config)
    _log_choices(config, loaded, size, (budget, mixed_budget), rank.calls)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            max_num_mixed_tokens=mixed_budget,
            max_urgent_share=config.max_urgent_share,
            max_urgent_pause_s=config.max_urgent_pause_s,
            max_model_len=size.max_model_len,
            max_num_scored_tokens=max(1, MAX_SCORED_LOGITS // loaded.vocab_size),
            eos_token_ids=loaded.eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
            weights_version=config.weights_version,
        ),
        BlockPool(size.num_blocks, config.block_size),
    )
    speculator = None
    if proposers:
        cost = dry_run.step_cost(config.max_num_seqs + config.speculation.max_tokens)
        speculator = Speculator(proposers, Controller(cost), scheduler.drafts, max_tokens=config.speculation.max_tokens)
        _log_speculation(config.speculation, cost)
    description = ModelDescription(
        max_model_len=size.max_model_len,
        vocab_size=loaded.vocab_size,
        block_size=config.block_size,
        dtype=str(loaded.dtype).removeprefix("torch."),
        tokenizer_source=loaded.source,
        runner="native" if rank.backend is None else "transformers",
        kernels=variant_of(loaded.native_library).name if loaded.native_library is not None else "",
        quantization=config.quantization or "none",
        tensor_parallel_size=config.tensor_parallel_size,
        weights_version=config.weights_version,
        fingerprint=fingerprint,
    )
    handoffs = None
    if wiring is not None:
        handoffs = wiring.attach(config, scheduler, rank, fingerprint, NoOtherRanks() if leader is None else leader.transfers)
    return Engine(
        scheduler=scheduler,
        runner=runner,
        sampler=Sampler(loaded.vocab_size, None if loaded.native_library is None else NativeDraw(loaded.native_library, rank.team)),
        description=description,
        handoffs=handoffs,
        leader=leader,
        speculator=speculator,
        grammars=_grammars(config, loaded),
    )


def _grammars(config: EngineConfig, loaded: LoadedModel) -> GrammarRequests:
    """The tokenizer is read by the first request with a grammar, in a thread."""

    def make_compiler() -> GrammarCompiler:
        definition = Tokenizer.load(loaded.source, config.trust_remote_code).definition()
        return LLGuidanceCompiler(definition, loaded.vocab_size, loaded.eos_token_ids)

    return GrammarRequests(make_compiler, vocab_size=loaded.vocab_size, eos_token_ids=loaded.eos_token_ids)


def _fingerprint(loaded: LoadedModel, config: EngineConfig) -> str:
    """Hash of the weights' names, shapes, first values and quantization; the same for any path, machine and number of ranks."""
    digest = hashlib.sha256(f"{loaded.model.config.model_type} {config.weights_version} {config.quantization}".encode())
    if loaded.part is not None:
        parameters = checkpoint_values(loaded.choice, FINGERPRINT_VALUES)
    else:
        named = sorted(loaded.model.named_parameters())
        parameters = [(name, tuple(one.shape), one.detach().flatten()[:FINGERPRINT_VALUES]) for name, one in named]
    for name, shape, values in parameters:
        digest.update(f"{name} {shape}".encode())
        digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()


class _SelfCheck:
    """Compares chunked paged logits with transformers' own on one short sequence. Constructed before a runner takes the weights."""

    def __init__(self, loaded: LoadedModel, max_model_len: int, quantization: Quantization | None) -> None:
        self._loaded = loaded
        self._allowed = CHECK_TOLERANCE.get(loaded.dtype, CHECK_TOLERANCE_HALF)
        if quantization is not None:
            self._allowed = CHECK_TOLERANCE_QUANTIZED[quantization]
        num_tokens = min(CHECK_TOKENS, max_model_len, loaded.max_positions or CHECK_TOKENS)
        self._token_ids = spread_token_ids(num_tokens, loaded.vocab_size)
        token_ids_T = torch.tensor(self._token_ids, device=loaded.device)
        if loaded.part is None:
            self._expected_TV = transformers_logits(loaded.model, token_ids_T)
        else:
            self._expected_TV = streamed_logits(loaded.choice, token_ids_T)

    def compare(self, dry_run: DryRun, *, is_native: bool) -> None:
        """Raises UnsupportedModel, or NativeMismatch for the native runner, if the logits differ."""
        num_tokens = len(self._token_ids)
        ends = sorted({max(1, num_tokens // 3), num_tokens - 1, num_tokens})
        expected_NV = self._expected_TV[[end - 1 for end in ends]]
        found_NV = dry_run.logits(self._token_ids, ends)
        difference = float((found_NV - expected_NV).abs().mean() / expected_NV.std())
        allowed = self._allowed
        logger.info("self-check against transformers: mean difference %.1e of the logits' deviation (allowed %.0e)", difference, allowed)
        if difference <= allowed:
            return
        message = f"its logits differ from transformers' own by {difference:.2g} (allowed {allowed:.2g})"
        if is_native:
            raise NativeMismatch(message)
        raise UnsupportedModel(
            f"model type {self._loaded.model.config.model_type!r}: {message}; it uses something that this engine does not know"
        )


def _log_choices(
    config: EngineConfig, loaded: LoadedModel, size: KVSize, budgets: tuple[int, int | None], calls: Mapping[int, LayerCall]
) -> None:
    per_token = bytes_per_token(kv_groups(calls), loaded.dtype)
    num_tokens = size.num_blocks * config.block_size
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB (%d bytes a token in %s): %s",
        size.num_blocks, config.block_size, num_tokens * per_token / 2**30, per_token, loaded.dtype, size.reason,
    )  # fmt: skip
    budget, mixed_budget = budgets
    reason = "configured"
    if mixed_budget is not None:
        reason = (
            f"measured to take about {config.max_step_s} s; {mixed_budget} where requests decode, for about {config.max_mixed_step_s} s, "
            "with at least a block for prompts"
        )
    logger.info(
        "max_model_len %d: room for %.1f such requests at once; max_num_seqs %d; %d tokens a step (%s); %d threads",
        size.max_model_len, num_tokens / size.max_model_len, config.max_num_seqs, budget, reason, torch.get_num_threads(),
    )  # fmt: skip


def _log_speculation(config: SpeculationConfig, cost: StepCost) -> None:
    rows = ", ".join(f"{num}: {1000 * cost.seconds(num):.1f}" for num in (1, 2, 4, 8, 16) if num <= cost.num_rows[-1])
    logger.info(
        "speculation: %s, up to %d drafts a request and step; ms of a step by rows: %s; %.2g ms more for a row behind 1,000 tokens",
        config.method, config.max_tokens, rows, 1e6 * cost.context_s,
    )  # fmt: skip
