"""An engine without a model: it says the prompt back, token by token, then ends. Scheduler, block pool and drafts are the real ones."""

from __future__ import annotations

import threading
from dataclasses import replace

from kvcache.block_pool import BlockPool
from replicas.engine.step_statistics import StepStatistics
from replicas.model_description import ModelDescription
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected, StepOutput, TokenLogprob
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.scheduler_config import SchedulerConfig
from replicas.scheduling.step_plan import ScheduledChunk
from replicas.speculation.prediction import PredictionProposer
from replicas.stats import ReplicaStats
from replicas.step_engine import KVChanges
from tests.scripted_proposer import eager_speculator

BLOCK_SIZE = 16
LOGPROB = -0.5
"""Of every token; its alternatives are itself and the next ids, each 0.25 less probable."""


class EchoEngine:
    """Token i of the answer is token i of the prompt; after the last comes EOS.

    `gate`, when cleared, holds every step back; `close_gate_after` clears it once that many more tokens are out, so that a test finds
    a request in the middle of its answer on any machine. `tokens_left` makes it die after that many more tokens.
    """

    def __init__(
        self,
        *,
        eos_token_id: int,
        vocab_size: int,
        max_model_len: int = 2048,
        max_num_seqs: int = 16,
        num_blocks: int = 512,
        failing_token_id: int | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=1024,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({eos_token_id}),
        )
        self.scheduler = Scheduler(config, self.pool)
        self.speculator = eager_speculator(self.scheduler.drafts, PredictionProposer())
        self.gate = threading.Event()
        self.gate.set()
        self.close_gate_after: int | None = None
        self.tokens_left: int | None = None
        self._eos = eos_token_id
        self._failing_token_id = failing_token_id
        self._statistics = StepStatistics()
        self.description = ModelDescription(
            max_model_len=max_model_len, vocab_size=vocab_size, block_size=BLOCK_SIZE, dtype="float32", tokenizer_source="fake"
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, request: GenerationRequest) -> None:
        if any(token_id >= self.description.vocab_size for token_id in request.prompt_ids):
            raise RequestRejected("prompt_ids holds an id outside the vocabulary")
        self.scheduler.add(request)

    def cancel(self, key: RequestKey) -> bool:
        return self.scheduler.cancel(key)

    def step(self) -> StepOutput:
        output = self._step()
        self._statistics.add(output)
        return output

    def _step(self) -> StepOutput:
        self.gate.wait(timeout=0.01)
        if not self.gate.is_set():
            return StepOutput(progress=tuple(self.scheduler.take_ended()))
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return StepOutput(progress=tuple(self.scheduler.take_ended()))
        plan = self.speculator.extend(plan)
        sampling = [chunk.state for chunk in plan.chunks if chunk.samples]
        first = {state.request.key: state.request for state in sampling if state.num_output_tokens == 0}
        token_ids = [self._next(state.request, state.num_output_tokens) for state in sampling]
        if self.close_gate_after is not None:
            self.close_gate_after -= len(token_ids)
            if self.close_gate_after <= 0:
                self.close_gate_after = None
                self.gate.clear()
        if self.tokens_left is not None:
            self.tokens_left -= len(token_ids)
            if self.tokens_left < 0:
                raise OSError("the fake engine dies, as its test wants")
        errors = {index: "the model gave NaN" for index, token_id in enumerate(token_ids) if token_id == self._failing_token_id}
        chunks = [chunk for chunk in plan.chunks if chunk.samples]
        drawn = [self._verified(chunk, token_id) for chunk, token_id in zip(chunks, token_ids, strict=True)]
        progress = self.speculator.observe(plan, self.scheduler.update(plan, drawn, errors))
        wants = {state.request.key: state.request.params.logprobs for state in sampling}
        return StepOutput(
            progress=tuple(_with_prompt_logprobs(_with_logprobs(item, wants.get(item.key)), first.get(item.key)) for item in progress),
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decode_tokens=plan.num_tokens - plan.num_prefill_tokens,
            num_preemptions=plan.num_preemptions,
            cuts_a_prompt=plan.cuts_a_prompt,
            step_s=0.001,
        )

    def wake(self) -> None:
        """It waits for nothing but its gate, and for that not long."""

    def stats(self) -> ReplicaStats:
        pool = self.pool.statistics()
        return replace(
            self._statistics.snapshot(),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
        )

    def kv_changes(self, since: int | None) -> KVChanges:
        log = self.pool.events
        if since is not None and (events := log.since(since)) is not None:
            return KVChanges(first_event=since, events=events, is_full_state=False)
        return KVChanges(first_event=log.next_number, events=self.pool.stored_blocks(), is_full_state=True)

    def close(self) -> None:
        for state in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.cancel(state.request.key)

    def _verified(self, chunk: ScheduledChunk, token_id: int) -> list[int]:
        """The next token, and those behind drafts that are right."""
        drawn = [token_id]
        for draft_id in chunk.draft_ids:
            if draft_id != drawn[-1] or draft_id in chunk.state.stop_token_ids:
                break
            drawn.append(self._next(chunk.state.request, chunk.state.num_output_tokens + len(drawn)))
        return drawn

    def _next(self, request: GenerationRequest, position: int) -> int:
        """With ignore_eos the prompt is said again and again."""
        prompt = request.prompt_ids
        if request.params.ignore_eos:
            return prompt[position % len(prompt)]
        return prompt[position] if position < len(prompt) else self._eos


def _with_prompt_logprobs(progress: RequestProgress, request: GenerationRequest | None) -> RequestProgress:
    """Token i of the prompt has the log-probability -i."""
    if request is None or not request.wants_prompt_logprobs or progress.finish_reason is FinishReason.FAILED:
        return progress
    num_top = request.params.prompt_logprobs or 0
    entries = tuple(
        TokenLogprob(token_id, -float(position), tuple((token_id + rank, -float(position) - 0.25 * rank) for rank in range(num_top)))
        for position, token_id in enumerate(request.prompt_ids[1:], 1)
    )
    return replace(progress, prompt_logprobs=entries)


def _with_logprobs(progress: RequestProgress, num_top: int | None) -> RequestProgress:
    if num_top is None or not progress.token_ids or progress.finish_reason is FinishReason.FAILED:
        return progress
    entries = tuple(
        TokenLogprob(token_id, LOGPROB, tuple((token_id + rank, LOGPROB - 0.25 * rank) for rank in range(num_top)))
        for token_id in progress.token_ids
    )
    return replace(progress, logprobs=entries)
