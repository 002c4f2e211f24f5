"""Drafts what followed the newest tokens in the same request or in finished answers of its tenant, after SuffixDecoding
(arXiv 2411.04975). Free of torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, islice

from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import HiddenStates, StepPlan
from replicas.speculation.occurrences import END, Continuation, Occurrences
from replicas.speculation.proposer import NO_DRAFT, Draft, ObservedStep

MAX_INDEXED_TOKENS = 512
"""Most tokens indexed in one call, all requests together: about a millisecond."""
MAX_REQUEST_TOKENS = 1 << 14
"""Most tokens of one request that are indexed; the oldest leave first."""
FIRST_PART_TOKENS = 1 << 10
MAX_PART_TOKENS = 1 << 15

Tenant = tuple[str, str]
"""Tenant and cache salt: who may see in a draft what somebody was answered."""


class SuffixProposer:
    """Owns the occurrences of short runs in each request, and in finished answers by tenant, `max_answer_tokens` of them at most."""

    name = "suffix"
    runs_a_model = False

    def __init__(self, max_answer_tokens: int) -> None:
        self._own: dict[RequestState, Occurrences] = {}
        self._answers = FinishedAnswers(max_answer_tokens)

    def propose(self, states: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        num_left = MAX_INDEXED_TOKENS
        drafts: list[Draft] = []
        for state, budget in zip(states, budgets, strict=True):
            own = self._own.get(state)
            if own is None:
                own = self._own[state] = Occurrences(min(state.max_num_tokens, MAX_REQUEST_TOKENS))
            new = state.token_ids[own.num_tokens : own.num_tokens + num_left]
            own.extend(new)
            num_left -= len(new)
            found = Continuation()
            if own.num_tokens == len(state.token_ids):
                found = own.continuation(state.token_ids, budget)
            shared = self._answers.continuation(_tenant(state), state.token_ids, budget)
            best = max(found, shared, key=lambda one: one.score)
            drafts.append(Draft(best.token_ids, evidence=best.match_length.bit_length()) if best.token_ids else NO_DRAFT)
        self._answers.index(num_left)
        return drafts

    def wants_hidden(self, plan: StepPlan) -> HiddenStates | None:
        return None

    def observe(self, step: ObservedStep) -> None:
        pass

    def forget(self, state: RequestState) -> None:
        self._own.pop(state, None)
        self._answers.add(_tenant(state), state.token_ids[len(state.request.prompt_ids) :])


class FinishedAnswers:
    """Owns the occurrences in finished answers, in parts that belong to one tenant each. Always: the parts have room for at most
    `max_tokens` tokens; the part that was begun first leaves first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._parts: deque[tuple[Tenant, Occurrences]] = deque()  # oldest first
        self._by_tenant: dict[Tenant, list[Occurrences]] = {}  # oldest first
        self._unread: deque[tuple[Tenant, list[int]]] = deque()
        self._num_unread = 0

    @property
    def num_tokens(self) -> int:
        """Tokens for which memory is held."""
        return sum(part.capacity for _, part in self._parts)

    def add(self, tenant: Tenant, token_ids: list[int]) -> None:
        """Remembers an answer; `index` makes it known. More unread tokens than there is room for are dropped."""
        if token_ids and self._num_unread + len(token_ids) <= self._max_tokens // 2:
            self._unread.append((tenant, token_ids))
            self._num_unread += len(token_ids)

    def index(self, most: int) -> None:
        """Reads answers of about `most` tokens."""
        while self._unread and most > 0:
            tenant, token_ids = self._unread.popleft()
            self._num_unread -= len(token_ids)
            now, later = token_ids[:most], token_ids[most:]
            self._read(tenant, now if later else [*now, END])
            most -= len(now)
            if later:
                self._unread.appendleft((tenant, later))
                self._num_unread += len(later)

    def continuation(self, tenant: Tenant, token_ids: Sequence[int], budget: int) -> Continuation:
        parts = self._by_tenant.get(tenant)
        if not parts:
            return Continuation()
        return max((part.continuation(token_ids, budget) for part in reversed(parts)), key=lambda one: one.score)

    def _read(self, tenant: Tenant, token_ids: list[int]) -> None:
        tokens = iter(token_ids)
        while (first := next(tokens, None)) is not None:
            part = self._part_with_room(tenant)
            if part is None:
                return
            part.extend(chain([first], islice(tokens, part.capacity - part.num_tokens - 1)))

    def _part_with_room(self, tenant: Tenant) -> Occurrences | None:
        parts = self._by_tenant.setdefault(tenant, [])
        if parts and parts[-1].num_tokens < parts[-1].capacity:
            return parts[-1]
        largest = 1 << (self._max_tokens // 2).bit_length() - 1 if self._max_tokens > 1 else 0
        capacity = min(2 * parts[-1].capacity if parts else FIRST_PART_TOKENS, MAX_PART_TOKENS, largest)
        if capacity < 16:
            del self._by_tenant[tenant]
            return None
        while self.num_tokens + capacity > self._max_tokens:
            self._drop_oldest()
        part = Occurrences(capacity)
        self._parts.append((tenant, part))
        self._by_tenant.setdefault(tenant, []).append(part)
        return part

    def _drop_oldest(self) -> None:
        tenant, _ = self._parts.popleft()
        parts = self._by_tenant[tenant]
        del parts[0]
        if not parts:
            del self._by_tenant[tenant]


def _tenant(state: RequestState) -> Tenant:
    return (state.request.tenant, state.request.cache_salt)
