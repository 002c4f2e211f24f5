"""Steps that a new engine runs before any request, to check and to time its runner."""

from __future__ import annotations

import time

import torch

from kvcache.hashing import CacheIdentity
from kvcache.prefix_cache import BlockKeyChain
from replicas.attention.step_tensors import StepTensors
from replicas.engine_config import EngineConfig
from replicas.model.kv_sizing import KVSize
from replicas.model.loader import LoadedModel
from replicas.model.rank_model import MAX_BUDGET_TOKENS
from replicas.model.runner import ModelRunner
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan
from replicas.speculation.step_cost import StepCost

MIN_BUDGET_TOKENS = 128
ROW_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128)
"""Rows whose step is timed: each small number, because kernels work in tiles and seconds grow by stairs."""
ROUNDS = 4
MAX_MEASURING_S = 3.0
"""No further round begins after this."""
MIN_ROW_SIZES, SLOW_STEP_S = 4, 0.5
"""Beyond so many sizes, none follows one whose step takes this long."""
CONTEXT_TOKENS, CONTEXT_ROWS = 1024, 9
"""A step of so many rows behind so many tokens shows what attention adds to a row."""


class DryRun:
    """Runs steps without a scheduler, on blocks that are still empty."""

    def __init__(self, runner: ModelRunner, loaded: LoadedModel, block_size: int, size: KVSize) -> None:
        self._runner, self._loaded, self._block_size = runner, loaded, block_size
        self.max_tokens = min(size.max_model_len, size.num_blocks * block_size)

    def logits(self, token_ids: list[int], chunk_ends: list[int]) -> torch.Tensor:
        """Runs one sequence in chunks that end at `chunk_ends`; returns the logits [len(chunk_ends), V] of their last tokens."""
        state = self._state(token_ids)
        rows: list[torch.Tensor] = []
        start = 0
        for end in chunk_ends:
            chunk = ScheduledChunk(state=state, start=start, num_tokens=end - start, is_prefill=True, logits=range(end - 1, end))
            step = StepTensors.of(StepPlan(chunks=(chunk,)), self._block_size)
            rows.append(self._runner.forward(step).logits_NV.clone())
            start = end
        return torch.cat(rows)

    def _state(self, token_ids: list[int]) -> RequestState:
        request = GenerationRequest(request_id="dry-run", prompt_ids=tuple(token_ids), params=SamplingParams(), seed=0)
        chain = BlockKeyChain(CacheIdentity(), self._block_size)
        state = RequestState(request, arrival_number=0, chain=chain, max_num_tokens=len(token_ids))
        state.block_ids = list(range(-(-len(token_ids) // self._block_size)))
        return state

    def step_cost(self, max_rows: int) -> StepCost:
        """Measured seconds of steps of 1 to about `max_rows` rows with logits, as a verification of drafts has them. Each is the best of
        several rounds over all numbers of rows, so that a neighbour on the machine who comes and goes does not bend the curve."""
        start_s = time.monotonic()
        plans: list[StepPlan] = []
        best_s: list[float] = []
        for size in (size for size in ROW_SIZES if size <= min(max_rows, self.max_tokens)):
            plans.append(self._rows(size, 0))
            best_s.append(min(self._time_s(plans[-1]), self._time_s(plans[-1])))  # the first at a size pays for allocations
            if best_s[-1] > SLOW_STEP_S and len(plans) >= MIN_ROW_SIZES:
                break
        num_sizes = len(plans)
        num_context = min(CONTEXT_TOKENS, self.max_tokens - CONTEXT_ROWS)
        if has_context := num_context > 0 and time.monotonic() - start_s < MAX_MEASURING_S:
            plans += [self._rows(size, context) for context in (0, num_context) for size in (1, CONTEXT_ROWS)]
            best_s += [self._time_s(plan) for plan in plans[num_sizes:]]
        for _ in range(ROUNDS):
            if time.monotonic() - start_s > MAX_MEASURING_S:
                break
            best_s = [min(best, self._time_s(plan)) for best, plan in zip(best_s, plans, strict=True)]
        context_s = 0.0
        if has_context:
            one_s, many_s, one_behind_s, many_behind_s = best_s[num_sizes:]
            context_s = (many_behind_s - many_s - (one_behind_s - one_s)) / ((CONTEXT_ROWS - 1) * num_context)
        return StepCost.measured(ROW_SIZES[:num_sizes], best_s[:num_sizes], context_s)

    def _rows(self, num_rows: int, num_context: int) -> StepPlan:
        """A step of one sequence with `num_rows` rows of logits behind `num_context` tokens, whose KV may be anything."""
        state = self._state(spread_token_ids(num_context + num_rows, self._loaded.vocab_size))
        logits = range(num_context, num_context + num_rows)
        chunk = ScheduledChunk(state=state, start=num_context, num_tokens=num_rows, is_prefill=False, logits=logits)
        return StepPlan(chunks=(chunk,))

    def _time_s(self, plan: StepPlan) -> float:
        self._sync()
        start_s = time.perf_counter()
        self._runner.forward(StepTensors.of(plan, self._block_size))
        self._sync()
        return time.perf_counter() - start_s

    def budgets_for(self, config: EngineConfig) -> tuple[int, int]:
        """Measured budgets (full steps, mixed steps): the tokens that a step computes in about `max_step_s` and `max_mixed_step_s`.
        The first is at least 128 and twice `max_num_seqs`, the second at least a block."""
        rate = self._tokens_per_s(config.max_step_s)
        blocks, mixed_blocks = (int(rate * s) // self._block_size for s in (config.max_step_s, config.max_mixed_step_s))
        budget = max(min(blocks * self._block_size, MAX_BUDGET_TOKENS), MIN_BUDGET_TOKENS, 2 * config.max_num_seqs)
        return budget, min(budget, max(mixed_blocks, 1) * self._block_size)

    def _tokens_per_s(self, max_step_s: float) -> float:
        """Best prefill rate over steps of doubling size, up to the first that takes more than half of `max_step_s`."""
        num_tokens, best = min(64, self.max_tokens), 0.0
        self._step_s(num_tokens)  # the first steps at a size pay for allocations and caches
        while True:
            elapsed_s = min(self._step_s(num_tokens), self._step_s(num_tokens))
            best = max(best, num_tokens / elapsed_s)
            if elapsed_s > max_step_s / 2 or 2 * num_tokens > min(self.max_tokens, MAX_BUDGET_TOKENS):
                return best
            num_tokens *= 2

    def _step_s(self, num_tokens: int) -> float:
        self._sync()
        start_s = time.monotonic()
        self.logits(spread_token_ids(num_tokens, self._loaded.vocab_size), [num_tokens])
        self._sync()
        return time.monotonic() - start_s

    def _sync(self) -> None:
        if self._loaded.device.type == "cuda":
            torch.cuda.synchronize(self._loaded.device)


def spread_token_ids(num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids spread over the vocabulary, always the same."""
    return [(7919 * i + 13) % vocab_size for i in range(num_tokens)]
