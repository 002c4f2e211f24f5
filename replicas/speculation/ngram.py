"""Drafts what followed the newest tokens earlier in the same request ("prompt lookup", transformers#27775). Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import HiddenStates, StepPlan
from replicas.speculation.proposer import NO_DRAFT, Draft, ObservedStep

MAX_N = 4
"""Longest run of tokens that is looked up. Longer matches are found by it too, and count as better evidence."""
MAX_MATCH = 16
"""Longest match whose length is counted."""
MAX_INDEXED_TOKENS = 1024
"""Most tokens indexed in one call, all requests together: about a millisecond. A request whose index is behind gets no draft yet."""


class NgramProposer:
    """Owns, for each request, where each run of 1 to MAX_N tokens last occurred: a few dictionary writes a token."""

    name = "ngram"
    runs_a_model = False

    def __init__(self) -> None:
        self._indices: dict[RequestState, _LatestRuns] = {}

    def propose(self, states: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        num_left = MAX_INDEXED_TOKENS
        drafts: list[Draft] = []
        for state, budget in zip(states, budgets, strict=True):
            index = self._indices.get(state)
            if index is None:
                index = self._indices[state] = _LatestRuns()
            num_left -= index.read(state.token_ids, num_left)
            drafts.append(index.draft(state.token_ids, budget) if index.num_read == len(state.token_ids) else NO_DRAFT)
        return drafts

    def wants_hidden(self, plan: StepPlan) -> HiddenStates | None:
        return None

    def observe(self, step: ObservedStep) -> None:
        pass

    def forget(self, state: RequestState) -> None:
        self._indices.pop(state, None)


class _LatestRuns:
    """Latest occurrence of every run of 1 to MAX_N tokens in a list that only grows. Runs at its very end have no successor yet and
    are not known."""

    __slots__ = ("_ends", "num_read")

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # run -> index of the token behind its latest occurrence
        self.num_read = 0

    def read(self, token_ids: Sequence[int], most: int) -> int:
        """Learns up to `most` tokens that are new; returns how many."""
        start, stop = self.num_read, min(len(token_ids), self.num_read + most)
        ends = self._ends
        for end in range(max(start, 1), stop):
            for first in range(max(0, end - MAX_N), end):
                ends[tuple(token_ids[first:end])] = end
        self.num_read = stop
        return stop - start

    def draft(self, token_ids: Sequence[int], budget: int) -> Draft:
        """Up to `budget` tokens behind the latest occurrence of the longest run that ends the list. Where that occurrence reaches the end
        of the list it is repeated: the text is periodic."""
        num_known = len(token_ids)
        for n in range(min(MAX_N, num_known), 0, -1):
            end = self._ends.get(tuple(token_ids[num_known - n :]))
            if end is not None:
                break
        else:
            return NO_DRAFT
        num_equal = n
        while num_equal < min(MAX_MATCH, end) and token_ids[end - 1 - num_equal] == token_ids[num_known - 1 - num_equal]:
            num_equal += 1
        drafted = list(token_ids[end : end + budget])
        period = num_known - end
        while len(drafted) < budget:
            drafted.append(drafted[len(drafted) - period])
        return Draft(drafted, evidence=num_equal.bit_length())
