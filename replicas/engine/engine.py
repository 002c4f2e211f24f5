"""The continuous-batching engine: schedule, run, sample, postprocess. Synchronous; `AsyncEngine` gives it a thread."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from replicas.attention.step_tensors import StepTensors
from replicas.engine.step_statistics import StepStatistics
from replicas.engine_config import EngineConfig
from replicas.handoff.handoffs import Handoffs
from replicas.handoff.wiring import HandoffWiring
from replicas.model.cuda_graphs import GraphedRunner
from replicas.model.runner import ModelRunner
from replicas.model_description import ModelDescription
from replicas.ranks.launcher import RankLauncher
from replicas.ranks.leader import Leader
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected, StepOutput, merge_progress
from replicas.sampling.sampler import BAD_LOGITS, SampledTokens, Sampler
from replicas.sampling.sampling_state import SamplingState
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.step_plan import StepPlan
from replicas.stats import HandoffStats, ReplicaStats
from replicas.step_engine import KVChanges

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
NO_HANDOFFS = HandoffStats()


class Engine:
    """Owns one model's scheduler, runner and sampler. Not thread-safe: one thread makes all calls.

    Every accepted request ends with exactly one progress that has a finish reason, whatever happens to its step.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        description: ModelDescription,
        clock: Callable[[], float] = time.monotonic,
        handoffs: Handoffs | None = None,
        leader: Leader | None = None,
        graphs: GraphedRunner | None = None,
    ) -> None:
        """`handoffs` lets it exchange KV with other engines; every engine computes prefills and decodes alike. `leader` owns
        the other ranks, which `runner` talks to. `graphs` is the runner when it counts what it replayed."""
        self.description = description
        self.scheduler = scheduler
        self.handoffs = handoffs
        self._runner = runner
        self._leader = leader
        self._graphs = graphs
        self._sampler = sampler
        self._clock = clock
        self._sampling: dict[RequestKey, SamplingState] = {}
        self._statistics = StepStatistics()
        self._num_failed_steps = 0  # in a row

    @classmethod
    def load(cls, config: EngineConfig, launcher: RankLauncher | None = None, wiring: HandoffWiring | None = None) -> Engine:
        """Loads the model and sizes everything. `launcher` starts further ranks elsewhere than on this machine; `wiring` says
        how handoffs travel. Raises ValueError (UnsupportedModel among them) naming the fix."""
        from replicas.engine.loader import load_engine

        return load_engine(config, wiring, launcher)

    @property
    def tokenizer_source(self) -> str:
        return self.description.tokenizer_source

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or (self.handoffs is not None and self.handoffs.has_work)

    def add_request(self, request: GenerationRequest) -> None:
        """Accepts a request for the next steps. Raises RequestRejected when it can never be served here."""
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
        if request.wants_handoff and self.handoffs is None:
            raise RequestRejected("wants_handoff is set, but this engine hands nothing over: its role is unified")
        state = self.scheduler.add(request)
        if request.handoff is not None and self.handoffs is not None:
            self.handoffs.start_pull(state)
        self._sampling[request.key] = SamplingState(
            request.params,
            request.seed,
            request.choice,
            request.prompt_ids,
            request.output_ids,
            self.scheduler.config.eos_token_ids,
        )

    def cancel(self, key: RequestKey) -> bool:
        """Frees the request's blocks at once; the next step reports it as cancelled. False when it already ended; what it
        left for another engine is taken back all the same."""
        is_cancelled = self.scheduler.cancel(key)
        if is_cancelled:
            del self._sampling[key]
        if self.handoffs is not None:
            self.handoffs.drop(key)
        return is_cancelled

    def step(self, *, may_wait: bool = True) -> StepOutput:
        """Computes one budget of tokens. A step that fails takes its own requests with it and no others.

        With nothing to compute it waits a little for transfers under way, unless `may_wait` is False. Raises RuntimeError
        once MAX_FAILED_STEPS steps in a row have failed: a broken device must not go on attracting work.
        """
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"the last {self._num_failed_steps} steps failed; the log has the reasons")
        start_s = self._clock()
        loaded = self._collect_loads()
        plan = self.scheduler.schedule()
        if self.handoffs is not None:
            self.handoffs.reserve()
        if not plan.chunks:
            progress = self.scheduler.take_ended()
            if not progress and not loaded and self.handoffs is not None and may_wait:
                self.handoffs.wait()
            output = StepOutput(progress=_merged(loaded, progress), num_preemptions=plan.num_preemptions)
            self._statistics.add(output)
            return output
        offers: list[RequestProgress] = []
        try:
            sampled = self._run(plan)
        except (RuntimeError, MemoryError) as error:  # what torch raises for a failed kernel or no memory
            logger.exception("a step of %d requests failed", len(plan.chunks))
            progress = self.scheduler.fail_step(plan, f"the engine step failed: {error}")
            self._num_failed_steps += 1
        except BaseException:  # a second interrupt, or a bug of ours: it goes on, but nobody may find blocks that nobody wrote
            self.scheduler.pool.forget(plan.published)
            raise
        else:
            self._num_failed_steps = 0
            if self.handoffs is not None:
                offers = self.handoffs.note_step(plan)
            progress = self.scheduler.update(plan, [[token_id] for token_id in sampled.token_ids], sampled.errors)
            progress = self._with_logprobs(plan, sampled, progress)
        self._follow(progress)
        if self.handoffs is not None:
            self.handoffs.note_progress(progress)
        num_prefill = plan.num_prefill_tokens
        output = StepOutput(
            progress=_merged(loaded, offers, progress),
            num_prefill_tokens=num_prefill,
            num_decode_tokens=plan.num_tokens - num_prefill,
            num_preemptions=plan.num_preemptions,
            cuts_a_prompt=plan.cuts_a_prompt,
            step_s=self._clock() - start_s,
        )
        self._statistics.add(output)
        return output

    def wake(self) -> None:
        """From any thread: a step that waits for transfers ends at once."""
        if self.handoffs is not None:
            self.handoffs.changed.set()

    def stats(self) -> ReplicaStats:
        scheduler = self.scheduler
        pool = scheduler.pool.statistics()
        running, waiting = scheduler.running, scheduler.waiting
        handoffs = self.handoffs
        return replace(
            self._statistics.snapshot(),
            num_graphed_steps=0 if self._graphs is None else self._graphs.num_graphed_steps,
            transfer_tokens_per_s=None if handoffs is None else handoffs.rate.tokens_per_s,
            handoffs=NO_HANDOFFS if handoffs is None else handoffs.stats(),
            num_running=len(running),
            num_waiting=len(waiting),
            num_uncomputed_tokens=sum(s.num_uncomputed_tokens for s in running if not (s.is_decoding or s.is_loading))
            + sum(s.num_uncomputed_tokens for s in waiting if not s.awaits_load),
            num_context_tokens=sum(s.num_computed_tokens for s in running),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
        )

    def kv_changes(self, since: int | None) -> KVChanges:
        """Prefix-cache events from number `since`; the full state when they are gone or `since` is None."""
        log = self.scheduler.pool.events
        if since is not None and (events := log.since(since)) is not None:
            return KVChanges(first_event=since, events=events, is_full_state=False)
        return KVChanges(first_event=log.next_number, events=self.scheduler.pool.stored_blocks(), is_full_state=True)

    def check(self) -> None:
        """Raises AssertionError when an invariant of blocks or requests does not hold."""
        if self.handoffs is None:
            self.scheduler.check()
            return
        self.handoffs.ownership.check()
        self.scheduler.check(self.handoffs.ownership.tables())

    def close(self) -> None:
        """Ends all requests without reporting them; the engine cannot be used again."""
        for key in list(self._sampling):
            self.cancel(key)
        if self.handoffs is not None:
            self.handoffs.close()
        if self._leader is not None:
            self._leader.close()

    def check_ranks(self) -> None:
        """Raises RankLost once another rank of this replica is lost, whether or not there is work. Any thread may ask."""
        if self._leader is not None:
            self._leader.check()

    def _collect_loads(self) -> list[RequestProgress]:
        """Requests whose KV has come from another replica may go on from here."""
        if self.handoffs is None:
            return []
        progress = self.handoffs.collect()
        self._follow(progress)
        return progress

    def _run(self, plan: StepPlan) -> SampledTokens:
        step = StepTensors.of(plan, self.description.block_size)
        logits_NV = self._runner.forward(step)
        states = [self._sampling[c.state.request.key] for c in plan.chunks if c.samples]
        if any(chunk.scored for chunk in plan.chunks):
            logits_NV = logits_NV[self._score(plan, logits_NV)]
        sampled = self._sampler.sample(logits_NV, states)
        for index in [index for index, state in enumerate(states) if state.prompt_logprobs]:
            if any(math.isnan(token.logprob) for token in states[index].prompt_logprobs or ()):
                sampled.errors[index] = BAD_LOGITS
        return sampled

    def _score(self, plan: StepPlan, logits_NV: torch.Tensor) -> list[int]:
        """Takes the prompt log-probabilities of this step's scored positions; returns the rows of N that sample."""
        sampling_rows: list[int] = []
        row = 0
        for chunk in plan.chunks:
            request, num_scored = chunk.state.request, len(chunk.scored)
            known = self._sampling[request.key].prompt_logprobs
            if num_scored and known is not None:
                targets = request.prompt_ids[chunk.scored.start + 1 : chunk.scored.stop + 1]
                known += self._sampler.score(logits_NV[row : row + num_scored], targets, request.params.prompt_logprobs or 0)
            row += num_scored
            if chunk.samples:
                sampling_rows.append(row)
                row += 1
        return sampling_rows

    def _with_logprobs(self, plan: StepPlan, sampled: SampledTokens, progress: list[RequestProgress]) -> list[RequestProgress]:
        """The progress of this step's requests with what they asked for beside tokens."""
        keys = [c.state.request.key for c in plan.chunks if c.samples]
        logprobs = {key: found for key, found in zip(keys, sampled.logprobs, strict=True) if found is not None}
        prompts = {key: found for key in keys if (found := self._sampling[key].prompt_logprobs) is not None}
        if not logprobs and not prompts:
            return progress
        completed: list[RequestProgress] = []
        for item in progress:
            if item.key in logprobs and item.token_ids:
                item = replace(item, logprobs=(logprobs[item.key],))
            if item.key in prompts and item.finish_reason not in (FinishReason.FAILED, FinishReason.CANCELLED):
                item = replace(item, prompt_logprobs=tuple(prompts[item.key]))
                self._sampling[item.key].prompt_logprobs = None
            completed.append(item)
        return completed

    def _follow(self, progress: list[RequestProgress]) -> None:
        """Moves the sampling states to where the scheduler's requests are now."""
        for item in progress:
            state = self._sampling.get(item.key)
            if state is None or item.finish_reason is FinishReason.CANCELLED:
                continue  # cancelled before the step; a newer attempt may already own the key
            if item.finish_reason is not None:
                del self._sampling[item.key]
            else:
                for token_id in item.token_ids:
                    state.append(token_id)


def _merged(*parts: list[RequestProgress]) -> tuple[RequestProgress, ...]:
    """What belongs to one request as one progress; in the order in which they first came."""
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
