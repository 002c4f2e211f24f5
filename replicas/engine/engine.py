"""The continuous-batching engine: schedule, run, sample, update. Synchronous; `AsyncEngine` gives it a thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from replicas.attention.step_tensors import StepTensors
from replicas.engine.chunk_sampler import ChunkSampler, DrawnTokens
from replicas.engine.grammar_requests import GrammarRequests
from replicas.engine.late_draws import LateDraws
from replicas.engine.mask_filler import MaskFiller
from replicas.engine.step_statistics import StepStatistics
from replicas.grammar.compiler import GrammarStatistics
from replicas.handoff.kv_exchange import KVExchange, NoExchange
from replicas.model.runner import ModelRunner
from replicas.model_description import ModelDescription
from replicas.ranks.leader import Leader
from replicas.request import (
    FinishReason,
    GenerationRequest,
    RequestKey,
    RequestProgress,
    RequestRejected,
    StepOutput,
    merge_progress,
)
from replicas.sampling.grammar_mask import GrammarMask
from replicas.sampling.sampler import Sampler
from replicas.scheduling.new_tokens import Ending, failure
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.step_plan import StepPlan
from replicas.scheduling.tier_loads import tier_loads
from replicas.speculation.speculator import Speculator
from replicas.stats import GrammarStats, ReplicaStats
from replicas.step_engine import KVChanges

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3


class Engine:
    """Owns one model's scheduler, runner and sampler. Not thread-safe: one thread makes all calls.

    Every accepted request ends with exactly one progress that has a finish reason, even if its step fails.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        description: ModelDescription,
        clock: Callable[[], float] = time.monotonic,
        handoffs: KVExchange | None = None,
        leader: Leader | None = None,
        speculator: Speculator | None = None,
        grammars: GrammarRequests | None = None,
    ) -> None:
        """`handoffs` exchanges KV with other engines; None is `NoExchange`. Every engine can compute prefills and decodes.
        `leader` owns the other ranks, to which `runner` sends each step. `speculator` drafts tokens; None drafts none.
        `grammars` compiles those of requests; None: requests with one are rejected."""
        self.description = description
        self.scheduler = scheduler
        self.handoffs: KVExchange = handoffs or NoExchange()
        self._runner = runner
        self._leader = leader
        self._speculator = speculator
        self._chunk_sampler = ChunkSampler(sampler)
        self._grammars = grammars
        self._masks = MaskFiller(None if grammars is None else grammars.wake)
        self._late_draws = LateDraws(sampler, self._masks.is_ready)
        self._clock = clock
        self._statistics = StepStatistics(scheduler.config.max_urgent_share)
        self._num_failed_steps = 0  # in a row

    @property
    def tokenizer_source(self) -> str:
        return self.description.tokenizer_source

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.handoffs.has_work or (self._grammars is not None and self._grammars.has_work)

    def add_request(self, request: GenerationRequest) -> None:
        """Accepts a request for the next steps. Raises RequestRejected if it can never be served here."""
        vocab_size = self.description.vocab_size
        params = request.params
        for name, ids in (
            ("prompt_ids", request.prompt_ids),
            ("output_ids", request.output_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            bad = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
            if bad is not None:
                raise RequestRejected(f"{name} holds {bad}; token ids are from 0 to {vocab_size - 1}")
        if request.adapter_id is not None:
            raise RequestRejected(f"adapter_id is {request.adapter_id!r}, but this engine has no adapters")
        self.handoffs.check_request(request)
        if self._grammars is not None and request.key in self._grammars:
            raise RequestRejected(f"request {request.request_id!r} choice {request.choice} is already running")
        if params.grammar is None:
            self._accept(request)
        elif self._grammars is None:
            raise RequestRejected("the request has a grammar, but this engine was made without a compiler of grammars")
        else:
            self._grammars.begin(request, max_tokens=self.scheduler.accepted_length(request) - len(request.prompt_ids))

    def cancel(self, key: RequestKey) -> bool:
        """Frees the request's blocks at once; the next step reports it as cancelled. Returns False if it already ended. Its offer
        to other engines is withdrawn in both cases."""
        is_cancelled = self.scheduler.cancel(key) or (self._grammars is not None and self._grammars.cancel(key))
        self.handoffs.drop(key)
        return is_cancelled

    def step(self, *, may_wait: bool = True) -> StepOutput:
        """Computes one budget of tokens. If the step fails, its requests fail and no others.

        With nothing to compute it waits a little for transfers, unless `may_wait` is False. Raises RuntimeError once
        MAX_FAILED_STEPS steps in a row have failed: a broken device must not attract more work.
        """
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"the last {self._num_failed_steps} steps failed; the log has the reasons")
        start_s = self._clock()
        loaded = self.handoffs.collect() + self._take_compiled() + self._draw_late()
        plan = self.scheduler.schedule(start_s)
        self.handoffs.reserve()
        if self._speculator is not None and plan.chunks:
            plan = self._speculator.extend(plan)
        output = self._compute(plan, loaded, start_s) if plan.chunks else self._idle(plan, loaded, may_wait=may_wait)
        self._statistics.add(output)
        return output

    def _accept(self, request: GenerationRequest, mask: GrammarMask | None = None) -> None:
        state = self.scheduler.add(request, mask)
        if mask is not None and (mask.error is not None or mask.must_end):  # after `output_ids`: the text ended where it was interrupted
            is_whole = mask.error is None
            self.scheduler.cancel(request.key, Ending(FinishReason.STOP) if is_whole else failure(state, mask.error or ""))
        elif request.handoff is not None:
            self.handoffs.start_pull(state)

    def _take_compiled(self) -> list[RequestProgress]:
        """Accepts requests whose grammar is ready; returns the endings of those that were refused or cancelled before."""
        if self._grammars is None or not (self._grammars.has_work or self._late_draws.has_work):
            return []
        ready, ended = self._grammars.collect()
        for request, mask in ready:
            self._accept(request, mask)
        return ended

    def _draw_late(self) -> list[RequestProgress]:
        """Draws the tokens whose masks were not ready in their step, and are now."""
        if not self._late_draws.has_work:
            return []
        states, drawn = self._late_draws.draw()
        progress = [
            self.scheduler.take_late(state, token_ids, drawn.errors.get(index))
            for index, (state, token_ids) in enumerate(zip(states, drawn.token_ids, strict=True))
        ]
        self.handoffs.note_progress(progress)
        return _with_logprobs(states, drawn, progress)

    def _compute(self, plan: StepPlan, loaded: list[RequestProgress], start_s: float) -> StepOutput:
        """Run, sample, update."""
        is_graphed = False
        offers: list[RequestProgress] = []
        self._masks.start(plan)
        try:
            try:
                result = self._runner.forward(StepTensors.of(plan, self.description.block_size))
            finally:
                late = self._masks.wait()
            drawn = self._chunk_sampler.sample(plan, result.logits_NV, late)
            self._late_draws.put_off(drawn.late, drawn.late_rows, result.logits_NV)
        except (RuntimeError, MemoryError) as error:  # what torch raises for a failed kernel or no memory
            logger.exception("a step of %d requests failed", len(plan.chunks))
            progress = self.scheduler.fail_step(plan, f"the engine step failed: {error}")
            self._num_failed_steps += 1
        except BaseException:  # a second interrupt, or a bug of ours: nobody may find blocks that nobody wrote
            self.scheduler.pool.forget(plan.published)
            raise
        else:
            self._num_failed_steps = 0
            is_graphed = result.is_graphed
            offers = self.handoffs.note_step(plan)
            states = [chunk.state for chunk in plan.chunks if chunk.samples]
            progress = _with_logprobs(states, drawn, self.scheduler.update(plan, drawn.token_ids, drawn.errors))
            if self._speculator is not None:
                progress = self._speculator.observe(plan, progress, result.hidden_LKW)
        self.handoffs.note_progress(progress)
        num_prefill = plan.num_prefill_tokens
        return StepOutput(
            progress=_merged(loaded, offers, progress),
            num_prefill_tokens=num_prefill,
            num_decode_tokens=plan.num_tokens - num_prefill,
            num_drafts=sum(len(chunk.draft_ids) for chunk in plan.chunks),
            num_preemptions=plan.num_preemptions,
            num_paused=plan.num_paused,
            is_graphed=is_graphed,
            cuts_a_prompt=plan.cuts_a_prompt,
            step_s=self._clock() - start_s,
        )

    def _idle(self, plan: StepPlan, loaded: list[RequestProgress], *, may_wait: bool) -> StepOutput:
        """Nothing to compute: reports what ended, or waits a little for transfers."""
        progress = self.scheduler.take_ended()
        if may_wait and not (progress or loaded):
            grammars = self._grammars
            if grammars is not None and (grammars.has_work or self._late_draws.has_work) and not self.handoffs.has_work:
                grammars.wait()
            self.handoffs.wait()
        return StepOutput(progress=_merged(loaded, progress), num_preemptions=plan.num_preemptions)

    def wake(self) -> None:
        """Ends a step that waits for transfers. Callable from any thread."""
        self.handoffs.wake()
        if self._grammars is not None:
            self._grammars.wake()

    def warm_up_grammars(self) -> None:
        """Begins to prepare for the first grammar, in another thread."""
        if self._grammars is not None:
            self._grammars.warm_up()

    def stats(self) -> ReplicaStats:
        scheduler = self.scheduler
        pool = scheduler.pool.statistics()
        running, waiting = scheduler.running, scheduler.waiting
        tiers = tier_loads(running, waiting)
        return replace(
            self._statistics.snapshot(),
            transfer_tokens_per_s=self.handoffs.tokens_per_s,
            handoffs=self.handoffs.stats(),
            grammars=self._grammar_stats(),
            num_running=len(running),
            num_waiting=len(waiting) + (0 if self._grammars is None else self._grammars.num_waiting),
            num_uncomputed_tokens=sum(tier.num_uncomputed_tokens for tier in tiers),
            num_context_tokens=sum(tier.num_context_tokens for tier in tiers),
            tiers=tiers,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            drafts=() if self._speculator is None else self._speculator.statistics(),
            speculation_gain=None if self._speculator is None else self._speculator.controller.predicted_gain,
        )

    def _grammar_stats(self) -> GrammarStats:
        counted = GrammarStatistics() if self._grammars is None else self._grammars.statistics()
        return GrammarStats(
            num_compiles=counted.num_compiles,
            compile_s=counted.compile_s,
            num_cache_hits=counted.num_cache_hits,
            num_refused=counted.num_refused,
            num_masks=self._masks.num_masks,
            mask_s=self._masks.mask_s,
            num_late_masks=self._masks.num_late,
            num_forced_tokens=self.scheduler.num_forced_tokens,
        )

    def kv_changes(self, since: int | None) -> KVChanges:
        """Prefix-cache events from number `since`; the full state if these are gone or `since` is None."""
        log = self.scheduler.pool.events
        if since is not None and (events := log.since(since)) is not None:
            return KVChanges(first_event=since, events=events, is_full_state=False)
        return KVChanges(first_event=log.next_number, events=self.scheduler.pool.stored_blocks(), is_full_state=True)

    def check(self) -> None:
        """Raises AssertionError if an invariant of blocks or requests does not hold."""
        self.scheduler.check(self.handoffs.checked_tables())

    def close(self) -> None:
        """Ends all requests without reporting them; the engine cannot be used again."""
        for state in [*self.scheduler.running, *self.scheduler.waiting]:
            self.cancel(state.key)
        self.handoffs.close()
        if self._grammars is not None:
            self._grammars.close()
        self._masks.close()
        if self._leader is not None:
            self._leader.close()

    def check_ranks(self) -> None:
        """Raises RankLost once another rank of this replica is lost, with or without work. Callable from any thread."""
        if self._leader is not None:
            self._leader.check()


def _with_logprobs(states: Sequence[RequestState], drawn: DrawnTokens, progress: list[RequestProgress]) -> list[RequestProgress]:
    """The progress of requests, `states` among them, with the log-probabilities that they requested and that were drawn for them."""
    logprobs = {state.key: found for state, found in zip(states, drawn.logprobs, strict=True) if found}
    scored = {state.key: state for state in states if state.prompt_logprobs is not None}
    if not logprobs and not scored:
        return progress
    completed: list[RequestProgress] = []
    for item in progress:
        if item.key in logprobs and item.token_ids:
            item = replace(item, logprobs=tuple(logprobs[item.key][: len(item.token_ids)]))
        if item.key in scored and item.finish_reason not in (FinishReason.FAILED, FinishReason.CANCELLED):
            state = scored[item.key]
            item = replace(item, prompt_logprobs=tuple(state.prompt_logprobs or ()))
            state.prompt_logprobs = None
        completed.append(item)
    return completed


def _merged(*parts: list[RequestProgress]) -> tuple[RequestProgress, ...]:
    """One progress for each request and attempt, in the order of their first appearance."""
    merged: list[RequestProgress] = []
    places: dict[tuple[RequestKey, int], int] = {}
    for item in (item for part in parts for item in part):
        name = (item.key, item.attempt)
        place = places.get(name)
        if place is not None and merged[place].finish_reason is None:
            merged[place] = merge_progress(merged[place], item)
        else:
            places[name] = len(merged)
            merged.append(item)
    return tuple(merged)
