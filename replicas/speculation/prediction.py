"""Drafts the text that the client expects as the answer (OpenAI's `prediction`). Free of torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import HiddenStates, StepPlan
from replicas.speculation.proposer import NO_DRAFT, Draft, ObservedStep

RUN_LENGTHS = (3, 2)
"""Runs of tokens by which an answer that left the prediction finds its way back, the longer first."""
MAX_EVIDENCE = 5


class PredictionProposer:
    """Owns, for each request with `predicted_ids`, the place in them at which its answer is."""

    name = "prediction"
    runs_a_model = False

    def __init__(self) -> None:
        self._places: dict[RequestState, PredictedText] = {}

    def propose(self, states: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        return [
            self._draft(state, budget) if state.request.predicted_ids else NO_DRAFT for state, budget in zip(states, budgets, strict=True)
        ]

    def _draft(self, state: RequestState, budget: int) -> Draft:
        text = self._places.get(state)
        if text is None:
            text = self._places[state] = PredictedText(state.request.predicted_ids)
        num_seen = len(state.request.prompt_ids) + text.num_seen
        text.follow(state.token_ids[num_seen:])
        return text.draft(budget)

    def wants_hidden(self, plan: StepPlan) -> HiddenStates | None:
        return None

    def observe(self, step: ObservedStep) -> None:
        pass

    def forget(self, state: RequestState) -> None:
        self._places.pop(state, None)


class PredictedText:
    """Owns the place in a predicted text at which an answer is, and finds it again behind a deviation: at the first place from there on
    where the answer's last tokens stand, else at the first place of all."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._place = 0
        self._is_lost = False
        self._num_equal = 0  # in a row
        self._tail: tuple[int, ...] = ()
        self._ends: dict[tuple[int, ...], list[int]] | None = None  # run -> places behind it, ascending
        self.num_seen = 0
        """Tokens of the answer so far."""

    def follow(self, new_ids: Sequence[int]) -> None:
        """The answer goes on with `new_ids`."""
        for token_id in new_ids:
            self._tail = (*self._tail[1 - RUN_LENGTHS[0] :], token_id)
            if not self._is_lost and self._place < len(self._token_ids) and self._token_ids[self._place] == token_id:
                self._place += 1
                self._num_equal += 1
            else:
                self._find()
        self.num_seen += len(new_ids)

    def draft(self, budget: int) -> Draft:
        if self._is_lost:
            return NO_DRAFT
        evidence = MAX_EVIDENCE if self._num_equal == self.num_seen else min(self._num_equal.bit_length(), MAX_EVIDENCE)
        return Draft(self._token_ids[self._place : self._place + budget], evidence=evidence)

    def _find(self) -> None:
        if self._ends is None:
            self._ends = {}
            for end in range(len(self._token_ids) + 1):
                for length in RUN_LENGTHS:
                    if end >= length:
                        self._ends.setdefault(tuple(self._token_ids[end - length : end]), []).append(end)
        self._is_lost = True
        for length in RUN_LENGTHS:
            if len(self._tail) >= length and (ends := self._ends.get(self._tail[-length:])):
                place = bisect_left(ends, self._place)
                self._place = ends[place if place < len(ends) else 0]
                self._is_lost = False
                self._num_equal = length
                return
