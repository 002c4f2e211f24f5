"""Decides which tokens each step computes. No phases; free of torch.

Iteration-level scheduling after Orca (OSDI'22), paged blocks after PagedAttention (SOSP'23), chunked prefill after
Sarathi-Serve (OSDI'24): every request just has uncomputed tokens, and a step distributes one token budget.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from kvcache.block_pool import BlockPool
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected
from replicas.sampling.sampling_state import LogitsMask
from replicas.scheduling.acceptance import accepted_length
from replicas.scheduling.block_tables import BlockTables
from replicas.scheduling.draft_slots import DraftSlots
from replicas.scheduling.new_tokens import CANCELLED, Ending, failure, take_tokens
from replicas.scheduling.prompt_budget import PromptBudget
from replicas.scheduling.request_state import RequestState, RequestStatus
from replicas.scheduling.scheduler_config import SchedulerConfig
from replicas.scheduling.step_plan import NO_POSITIONS, ScheduledChunk, StepPlan
from replicas.scheduling.urgent_pauses import UrgentPauses


class Scheduler:
    """Owns waiting and running requests and their block tables.

    Always: running requests hold blocks for every token that a step has computed or planned, waiting ones hold none; each
    accepted request is reported with a finish reason exactly once. At equal priority the earlier request keeps its blocks;
    a waiting request preempts a running one only if its priority is strictly more urgent, and decodes step aside only for the prompts
    of such requests.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        if config.max_model_len > pool.num_blocks * pool.block_size:
            raise ValueError(
                f"max_model_len ({config.max_model_len}) needs more than the {pool.num_blocks * pool.block_size} tokens of KV cache"
            )
        self.config = config
        self.pool = pool
        self._tables = BlockTables(pool, enable_prefix_caching=config.enable_prefix_caching, weights_version=config.weights_version)
        self._states: dict[RequestKey, RequestState] = {}
        self._waiting: list[RequestState] = []  # by urgency
        self._running: list[RequestState] = []  # by urgency
        self._ended: list[RequestProgress] = []  # endings not reported yet
        self._new_loads: list[RequestState] = []  # not returned by take_loads yet
        self._pauses = UrgentPauses(config)
        self.drafts = DraftSlots(
            self._tables, min(config.max_num_batched_tokens, config.max_num_mixed_tokens or config.max_num_batched_tokens)
        )
        self._num_arrivals = 0
        self.num_forced_tokens = 0
        """Tokens that grammars forced, of all requests so far; this number only grows."""

    @property
    def running(self) -> Sequence[RequestState]:
        return self._running

    @property
    def waiting(self) -> Sequence[RequestState]:
        return self._waiting

    @property
    def has_work(self) -> bool:
        return bool(self._states or self._ended)

    def add(self, request: GenerationRequest, mask: LogitsMask | None = None) -> RequestState:
        """Accepts a request; `mask` is its grammar, if any. Raises RequestRejected if it can never run here, not for a full cache."""
        state = RequestState(
            request,
            arrival_number=self._num_arrivals,
            chain=self._tables.chain(request),
            max_num_tokens=self.accepted_length(request),
            eos_token_ids=self.config.eos_token_ids,
            mask=mask,
        )
        self._num_arrivals += 1
        self._states[request.key] = state
        insort(self._waiting, state, key=_urgency)
        return state

    def accepted_length(self, request: GenerationRequest) -> int:
        """Number of tokens at which the request would end. Raises RequestRejected for what `add` cannot accept."""
        if request.key in self._states:
            raise RequestRejected(f"request {request.request_id!r} choice {request.choice} is already running")
        return accepted_length(request, self.config.max_model_len)

    def expect_load(self, key: RequestKey) -> None:
        """Marks a waiting request whose KV comes from another replica: once admitted, it computes nothing until `end_load`."""
        state = self._states[key]
        assert state.status is RequestStatus.WAITING, "only a waiting request can expect a load"
        state.awaits_load = True

    def take_loads(self) -> list[RequestState]:
        """Newly admitted requests whose blocks wait for KV behind the first `num_computed_tokens` tokens; each is returned once."""
        loads, self._new_loads = self._new_loads, []
        return [state for state in loads if state.is_loading]

    def end_load(self, key: RequestKey, num_tokens: int = 0, output_ids: Sequence[int] = ()) -> RequestProgress | None:
        """Ends a load: the blocks hold KV of the first `num_tokens` tokens, followed by `output_ids`. With 0 the KV is computed here.

        Returns progress if some of `output_ids` were not known. Does nothing if the request no longer waits for a load.
        """
        state = self._states.get(key)
        if state is None:
            return None
        state.awaits_load = False
        if not state.is_loading:
            return None
        state.is_loading = False
        if num_tokens == 0:
            return None
        new_ids = output_ids[len(state.token_ids) - num_tokens :]
        num_computed = num_tokens if new_ids else min(num_tokens, len(state.token_ids) - 1)
        self._tables.publish(state, state.num_computed_tokens, num_computed)
        state.num_computed_tokens = max(num_computed, state.num_computed_tokens)
        return self._append(state, new_ids) if new_ids else None

    def cancel(self, key: RequestKey, ending: Ending = CANCELLED) -> bool:
        """Ends a request between two steps and frees its blocks at once; False if it already ended."""
        state = self._states.get(key)
        if state is None:
            return False
        self._end(state)
        self._ended.append(self._progress(state, ending))
        return True

    def schedule(self, now_s: float = 0.0) -> StepPlan:
        """Plans one step: first running requests that decode, then running prefills, then waiting requests. `drafts` can extend it.
        `now_s`, from a clock that never goes back, bounds the pauses of decodes."""
        num_preemptions = self._make_room_for_urgent()
        budget = self.config.max_num_batched_tokens
        chunks: list[ScheduledChunk] = []
        published: list[int] = []
        paused = self._pauses.choose(self._running, now_s)
        decoding = [state for state in self._running if state.is_decoding and state not in paused]
        catching_up = [state for state in self._running if not state.is_decoding]
        for state in decoding:  # a victim is always less urgent than the request that needs its blocks, and comes after it
            if state.status is RequestStatus.RUNNING:
                num_preemptions += self._grow(state)
        decoding = [state for state in decoding if state.status is RequestStatus.RUNNING]
        for num_after, state in zip(range(len(decoding) - 1, -1, -1), decoding, strict=True):  # each later one gets at least a token
            budget -= self._schedule_chunk(state, budget - num_after, chunks, published)
        streaming = [chunk for chunk in chunks if chunk.state.num_output_tokens]  # before its first token a stream has no gap
        catching_up = [state for state in catching_up if state.status is RequestStatus.RUNNING and not state.is_held]
        prompts = PromptBudget(budget, self.config.max_num_mixed_tokens, self.pool.block_size, streaming, catching_up, paused)
        for state in catching_up:
            if num_left := prompts.left_for(state):
                prompts.take(state, self._schedule_chunk(state, num_left, chunks, published))
        while self._waiting and num_preemptions == 0:
            head = self._waiting[0]
            num_left = prompts.left_for(head)
            if not (num_left or head.awaits_load) or not self._try_admit(head):
                break
            if not head.is_loading:
                prompts.take(head, self._schedule_chunk(head, num_left, chunks, published))
        self._pauses.note_step(sum(chunk.num_tokens for chunk in chunks))
        return StepPlan(chunks=tuple(chunks), published=tuple(published), num_preemptions=num_preemptions, num_paused=len(paused))

    def update(self, plan: StepPlan, token_ids: Sequence[Sequence[int]], errors: Mapping[int, str] | None = None) -> list[RequestProgress]:
        """Takes the result of a step: `token_ids[i]` are the new tokens of the i-th chunk that samples. Drafts equal to them are accepted
        and count as computed; the other drafts do not, so their KV is overwritten later. No new tokens: the draw comes later (`take_late`).

        `errors` maps such an index i to the reason why its request fails. Returns the progress of every request that got
        tokens or ended, cancelled ones included.
        """
        progress, self._ended = self._ended, []
        samples = iter(enumerate(token_ids))
        for chunk in plan.chunks:
            state = chunk.state
            state.num_computed_tokens += chunk.num_tokens
            state.num_scored += len(chunk.scored)
            if not chunk.samples:
                continue
            index, new_ids = next(samples)
            if errors and index in errors:
                progress.append(self._fail(state, errors[index]))
            elif new_ids:
                progress.append(self._append(state, new_ids, chunk.draft_ids))
            else:
                state.awaits_draw = True
                state.num_computed_tokens = len(state.token_ids)
                self._tables.trim(state)
        return progress

    def take_late(self, state: RequestState, new_ids: Sequence[int], error: str | None = None) -> RequestProgress:
        """Takes the token of a request that `awaits_draw`, between two steps, or the reason why it fails."""
        assert state.awaits_draw, "the request does not wait for a draw"
        state.awaits_draw = False
        return self._append(state, new_ids) if error is None else self._fail(state, error)

    def fail_step(self, plan: StepPlan, error: str) -> list[RequestProgress]:
        """Fails the requests of a step that raised an error, and forgets the blocks that its plan published."""
        progress, self._ended = self._ended, []
        self.pool.forget(plan.published)
        for chunk in plan.chunks:
            self._end(chunk.state)
            progress.append(self._progress(chunk.state, Ending(FinishReason.FAILED, error=error)))
        return progress

    def take_ended(self) -> list[RequestProgress]:
        """Endings since the last step, if there is no step whose `update` reports them."""
        progress, self._ended = self._ended, []
        return progress

    def check(self, other_tables: Sequence[Sequence[int]] = ()) -> None:
        """Raises AssertionError if an invariant does not hold. `other_tables` are block tables held by transfers."""
        self._tables.check(list(self._states.values()), other_tables)
        assert all(state.status is RequestStatus.RUNNING for state in self._running), "a running request has another status"
        for state in self._waiting:
            assert state.status is RequestStatus.WAITING, "a waiting request has another status"
            assert not state.block_ids, "a waiting request holds blocks"
            assert not state.is_loading, "a waiting request is loading"
        assert len(self._running) + len(self._waiting) == len(self._states), "a request is lost"
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=_urgency), "a queue is out of order"

    def _make_room_for_urgent(self) -> int:
        """Preempts for a waiting request of strictly more urgent priority, if that gets it admitted. Returns the number of victims."""
        num_preemptions = 0
        while self._waiting and self._running:
            head = self._waiting[0]
            if head.request.priority >= self._running[-1].request.priority or self._try_admit(head):
                break
            victims = [state for state in self._running if state.request.priority > head.request.priority]
            if not self._tables.could_fill_without(victims, head, has_others=len(victims) < len(self._running)):
                break
            while not self._try_admit(head):
                self._preempt(self._running[-1])
                num_preemptions += 1
        return num_preemptions

    def _try_admit(self, state: RequestState) -> bool:
        """Moves a waiting request to running, with blocks for all its tokens, cached ones shared; False if there is no room."""
        if len(self._running) >= self.config.max_num_seqs or not self._tables.try_fill(state, has_others=bool(self._running)):
            return False
        state.begin_catching_up()
        if state.num_preemptions == 0:
            state.num_cached_tokens = min(state.num_computed_tokens, len(state.request.prompt_ids))
        del self._waiting[self._index(self._waiting, state)]
        insort(self._running, state, key=_urgency)
        state.status = RequestStatus.RUNNING
        if state.awaits_load:
            state.awaits_load, state.is_loading = False, True
            self._new_loads.append(state)
        return True

    def _grow(self, state: RequestState) -> int:
        """Gives a decoding request the blocks for its newest tokens, preempting the least urgent requests first.

        It preempts itself if no less urgent one is left. Returns the number of victims.
        """
        num_preemptions = 0
        while self._tables.lacks_blocks(state):
            if self._tables.try_grow(state):
                continue
            victim = self._running[-1]
            self._preempt(victim)
            num_preemptions += 1
            if victim is state:
                break
        return num_preemptions

    def _schedule_chunk(self, state: RequestState, budget: int, chunks: list[ScheduledChunk], published: list[int]) -> int:
        """Plans up to `budget` tokens of a running request, and publishes the blocks that they fill. Returns the number of planned tokens.

        Each layer writes all keys and values before its attention reads any, so a request later in the same plan may
        already share these blocks.
        """
        start, num_known = state.num_computed_tokens, len(state.token_ids)
        num_tokens = min(num_known - start, budget)
        first_logit = num_known - 1
        if state.num_scored < state.num_to_score:
            room = self.config.max_num_scored_tokens - sum(len(chunk.scored) for chunk in chunks)
            if room < state.num_to_score - state.num_scored:
                num_tokens = min(num_tokens, state.num_scored + room - start)
            if num_tokens == 0:
                return 0
            first_logit = state.num_scored
        end = start + num_tokens
        published += self._tables.publish(state, start, end)
        logits = range(first_logit, end) if end > first_logit else NO_POSITIONS
        chunks.append(ScheduledChunk(state=state, start=start, num_tokens=num_tokens, is_prefill=not state.is_decoding, logits=logits))
        return num_tokens

    def _append(self, state: RequestState, new_ids: Sequence[int], draft_ids: Sequence[int] = ()) -> RequestProgress:
        """Appends new tokens up to the one that ends the request. `draft_ids` are the drafts that the step computed at their positions."""
        num_known, num_forced = len(state.token_ids), state.num_forced_tokens
        ending = take_tokens(state, new_ids)
        self.num_forced_tokens += state.num_forced_tokens - num_forced
        if draft_ids:
            self._keep_accepted(state, num_known, draft_ids)
        taken = tuple(state.token_ids[num_known:])
        if ending is None and state.request.wants_handoff:
            ending = Ending(FinishReason.HANDOFF)
        if ending is not None:
            self._end(state)
        return self._progress(state, ending, token_ids=taken)

    def _keep_accepted(self, state: RequestState, num_known: int, draft_ids: Sequence[int]) -> None:
        """Counts the drafts as computed that equal the tokens behind the first `num_known`, and publishes the blocks that they fill."""
        new_ids = state.token_ids[num_known:]
        num_accepted = next((i for i, (new, draft) in enumerate(zip(new_ids, draft_ids, strict=False)) if new != draft), len(draft_ids))
        state.num_computed_tokens = min(num_known + num_accepted, len(state.token_ids) - 1)
        self._tables.publish(state, num_known, state.num_computed_tokens)
        self._tables.trim(state)

    def _fail(self, state: RequestState, error: str) -> RequestProgress:
        self.pool.forget(state.block_ids)  # its KV may be the cause
        self._end(state)
        return self._progress(state, failure(state, error))

    def _preempt(self, state: RequestState) -> None:
        """Takes all blocks of a running request; later it is recomputed from what is still cached."""
        self._release_blocks(state)
        del self._running[self._index(self._running, state)]
        state.num_computed_tokens = 0
        state.num_preemptions += 1
        state.status = RequestStatus.WAITING
        insort(self._waiting, state, key=_urgency)

    def _end(self, state: RequestState) -> None:
        queue = self._running if state.status is RequestStatus.RUNNING else self._waiting
        del queue[self._index(queue, state)]
        del self._states[state.key]
        self._release_blocks(state)
        state.status = RequestStatus.ENDED

    def _release_blocks(self, state: RequestState) -> None:
        state.is_loading = False  # KV still in transfer is dropped on arrival
        state.awaits_draw = False  # its last token is computed again
        self._tables.release(state)

    @staticmethod
    def _index(queue: list[RequestState], state: RequestState) -> int:
        return bisect_left(queue, state.urgency, key=_urgency)

    @staticmethod
    def _progress(state: RequestState, ending: Ending | None, *, token_ids: tuple[int, ...] = ()) -> RequestProgress:
        return RequestProgress(
            key=state.key,
            attempt=state.request.attempt,
            token_ids=token_ids,
            finish_reason=ending.reason if ending else None,
            stop_token_id=ending.stop_token_id if ending else None,
            num_cached_tokens=state.num_cached_tokens,
            error=ending.error if ending else None,
            failure_cause=ending.failure_cause if ending else None,
        )


def _urgency(state: RequestState) -> tuple[int, int]:
    return state.urgency
