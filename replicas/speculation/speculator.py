"""Drafts between two steps: asks the proposers, lets the controller choose, and learns from what was accepted. Free of torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replicas.request import RequestKey, RequestProgress
from replicas.scheduling.draft_slots import DraftSlots
from replicas.scheduling.request_state import RequestState, RequestStatus
from replicas.scheduling.step_plan import StepPlan
from replicas.speculation.acceptance import Kind
from replicas.speculation.controller import Controller, Offer, Outlook
from replicas.speculation.prediction import PredictionProposer
from replicas.speculation.proposer import NO_DRAFT, Draft, ObservedStep, Proposer
from replicas.speculation.statistics import DraftCounts
from replicas.stats import DraftStats

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

NUM_RESTING_STEPS = 4
"""Steps in which nothing is looked at after one in which no request was worth a look: then speculation costs next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanting:
    """A decoding request that could get drafts in this step."""

    index: int
    """Of its chunk in the plan."""
    state: RequestState
    outlook: Outlook
    room: int
    """The most drafts."""


class Speculator:
    """Owns the proposers, the controller and the outlook of each request. Its caller makes all calls from one thread, between steps.

    Proposers are asked in order: the first that has a draft for a request makes its offer. One that runs a model comes last, and is asked
    only when it is expected to pay. A proposer that raises is not asked again: requests go on without it.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        controller: Controller,
        slots: DraftSlots,
        *,
        max_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_tokens` is the most drafts of a request in one step."""
        if sum(proposer.runs_a_model for proposer in proposers) > 1:
            raise ValueError("only one proposer of an engine can run a model")
        self.controller = controller
        self._quick = [proposer for proposer in proposers if not proposer.runs_a_model]
        self._model = next((proposer for proposer in proposers if proposer.runs_a_model), None)
        self._slots = slots
        self._max_tokens = max_tokens
        self._clock = clock
        self._counts = DraftCounts()
        self._outlooks: dict[RequestState, Outlook] = {}
        self._chosen: dict[RequestState, Kind] = {}  # of the planned step
        self._planned_s = 0.0
        self._num_steps_to_rest = 0

    def extend(self, plan: StepPlan) -> StepPlan:
        """The plan with drafts, and with the hidden states that a proposer wants of the step."""
        self._chosen = {}
        self.controller.begin_step(plan.num_tokens)
        if self._num_steps_to_rest:
            self._num_steps_to_rest -= 1
        else:
            self._forget_ended()
            wanting = self._wanting(plan)
            if wanting and (budget := self._slots.budget(plan)):
                plan = self._draft(plan, wanting, budget)
        if self._model is not None and (hidden := self._model.wants_hidden(plan)) is not None:
            plan = replace(plan, hidden=hidden)
        self._planned_s = self._clock()
        return plan

    def observe(self, plan: StepPlan, progress: list[RequestProgress], hidden_LKW: torch.Tensor | None = None) -> list[RequestProgress]:
        """Called when the new tokens of the step planned last are appended to its requests. Returns their progress with what became of
        drafts that a client predicted."""
        seconds = self._clock() - self._planned_s
        num_accepted = [0] * len(plan.chunks)
        predicted: dict[RequestKey, tuple[int, int]] = {}  # accepted, refused
        num_drafts = num_context = 0
        for index, chunk in enumerate(plan.chunks if self._chosen else ()):
            num_drafted, accepted = len(chunk.draft_ids), 0
            if num_drafted:
                num_known = chunk.start + chunk.num_tokens - num_drafted
                for draft_id, token_id in zip(chunk.draft_ids, chunk.state.token_ids[num_known:], strict=False):
                    if draft_id != token_id:
                        break
                    accepted += 1
                num_drafts += num_drafted
                num_context += num_drafted * num_known
                kind = self._chosen[chunk.state]
                self.controller.note_verified(self._outlooks[chunk.state], kind, num_drafted, accepted)
                self._counts.note(kind[0], num_drafted, accepted)
                if kind[0] == PredictionProposer.name:
                    predicted[chunk.state.key] = (accepted, num_drafted - accepted)
            num_accepted[index] = accepted
        if not any(chunk.is_prefill for chunk in plan.chunks):
            self.controller.note_step(plan.num_tokens - num_drafts, num_drafts, num_context, seconds)
        step = ObservedStep(plan=plan, num_accepted=num_accepted, hidden_LKW=hidden_LKW)
        for proposer in self._proposers():
            try:
                proposer.observe(step)
            except (RuntimeError, MemoryError) as error:
                self._drop(proposer, error)
        return [_with_predicted(item, *predicted[item.key]) if item.key in predicted else item for item in progress]

    def statistics(self) -> tuple[DraftStats, ...]:
        return self._counts.snapshot()

    def _proposers(self) -> list[Proposer]:
        return self._quick if self._model is None else [*self._quick, self._model]

    def _wanting(self, plan: StepPlan) -> list[_Wanting]:
        wanting: list[_Wanting] = []
        for index, (chunk, room) in enumerate(zip(plan.chunks, self._slots.rooms(plan), strict=True)):
            state = chunk.state
            outlook = self._outlooks.get(state)
            if outlook is None:  # prompts too: a proposer learns of every request in a step
                outlook = self._outlooks[state] = Outlook(len(state.token_ids))
            if room and state.request.speculates:
                wanting.append(_Wanting(index=index, state=state, outlook=outlook, room=min(room, self._max_tokens)))
        return wanting

    def _draft(self, plan: StepPlan, wanting: list[_Wanting], budget: int) -> StepPlan:
        num_rows = plan.num_tokens
        drafts = self._quick_drafts(wanting, num_rows)
        if self._model is not None and drafts:
            drafts = self._without_worse_than_model(self._model, drafts, wanting, num_rows)
        lengths = self._choose(num_rows, drafts, budget)
        if self._model is not None:
            left = [one for one in wanting if not lengths.get(one.index)]
            budget -= sum(lengths.values())
            if left and (more := self._model_drafts(self._model, left, num_rows + sum(lengths.values()), budget)):
                drafts |= more
                lengths |= {index: len(draft.token_ids) for index, (_, _, draft) in more.items()}
        by_index: dict[int, Sequence[int]] = {}
        for index, (one, kind, draft) in drafts.items():
            if lengths.get(index):
                by_index[index] = draft.token_ids[: lengths[index]]
                self._chosen[one.state] = kind
                one.outlook.drafted_at = len(one.state.token_ids)
        if by_index or self._model is not None:
            return self._slots.extend(plan, [by_index.get(index, ()) for index in range(len(plan.chunks))])
        if not any(one.outlook.looked_at_step == self.controller.step for one in wanting):
            self._num_steps_to_rest = NUM_RESTING_STEPS
        return plan

    def _quick_drafts(self, wanting: list[_Wanting], num_rows: int) -> dict[int, tuple[_Wanting, Kind, Draft]]:
        """Drafts of proposers without a model, by the index of the chunk."""
        drafts: dict[int, tuple[_Wanting, Kind, Draft]] = {}
        if not self._quick:
            return drafts
        requests = [(one.state, one.outlook) for one in wanting]
        has_predicted = any(one.state.request.predicted_ids for one in wanting)
        names = [proposer.name for proposer in self._quick if has_predicted or proposer.name != PredictionProposer.name]
        asked = [wanting[place] for place in self.controller.worth_a_look(requests, num_rows, names)]
        if not asked:
            return drafts
        start_s = self._clock()
        for one in asked:
            one.outlook.is_productive = False  # until a draft is chosen
        for proposer in list(self._quick):
            missing = [one for one in asked if one.index not in drafts]
            for one, draft in zip(missing, self._propose(proposer, missing, [one.room for one in missing]), strict=True):
                if draft.token_ids:
                    drafts[one.index] = (one, (proposer.name, draft.evidence), draft)
        self.controller.note_looks(len(asked), self._clock() - start_s)
        return drafts

    def _choose(self, num_rows: int, drafts: dict[int, tuple[_Wanting, Kind, Draft]], budget: int) -> dict[int, int]:
        """How many tokens of each draft to verify."""
        offers = [self._offer(one, kind, min(len(draft.token_ids), one.room)) for one, kind, draft in drafts.values()]
        lengths = dict(zip(drafts, self.controller.choose(num_rows, offers, budget), strict=True))
        for index, (one, _, _) in drafts.items():
            one.outlook.is_productive = lengths[index] > 0
            if not lengths[index] and sum(lengths.values()) < budget and self.controller.try_probe(one.state, one.outlook, num_rows):
                lengths[index] = 1
        return lengths

    def _without_worse_than_model(
        self, model: Proposer, drafts: dict[int, tuple[_Wanting, Kind, Draft]], wanting: list[_Wanting], num_rows: int
    ) -> dict[int, tuple[_Wanting, Kind, Draft]]:
        """The drafts whose first token is at least as sure as the model's would be, if the model is worth its time at all."""
        offers = {one.index: self._offer(one, (model.name, 0), one.room) for one in wanting}
        if self.controller.drafts_of_model(num_rows, list(offers.values())) == 0:
            return drafts
        return {
            index: (one, kind, draft)
            for index, (one, kind, draft) in drafts.items()
            if self.controller.survival(one.outlook, kind, 1)[0] >= offers[index].survival[0]
        }

    def _model_drafts(
        self, proposer: Proposer, left: list[_Wanting], num_rows: int, budget: int
    ) -> dict[int, tuple[_Wanting, Kind, Draft]]:
        kind = (proposer.name, 0)
        num_drafts = min(self.controller.drafts_of_model(num_rows, [self._offer(one, kind, one.room) for one in left]), budget // len(left))
        if num_drafts == 0:
            probed = self.controller.try_probe_of_model([(one.state, one.outlook) for one in left], num_rows)
            left, num_drafts = [left[place] for place in probed][:budget], 1
        budgets = [self._slots.reserve(one.state, min(num_drafts, one.room)) for one in left]
        asked = [(one, most) for one, most in zip(left, budgets, strict=True) if most > 0]
        if not asked:
            return {}
        start_s = self._clock()
        found = self._propose(proposer, [one for one, _ in asked], [most for _, most in asked])
        self.controller.note_model(len(asked), max(most for _, most in asked), self._clock() - start_s)
        return {one.index: (one, kind, draft) for (one, _), draft in zip(asked, found, strict=True) if draft.token_ids}

    def _offer(self, one: _Wanting, kind: Kind, num_drafts: int) -> Offer:
        survival = self.controller.survival(one.outlook, kind, num_drafts)
        return Offer(kind=kind, survival=survival, num_context_tokens=len(one.state.token_ids))

    def _propose(self, proposer: Proposer, asked: Sequence[_Wanting], budgets: Sequence[int]) -> Sequence[Draft]:
        if not asked:
            return []
        try:
            return proposer.propose([one.state for one in asked], budgets)
        except (RuntimeError, MemoryError) as error:  # what torch raises for a failed kernel or no memory
            self._drop(proposer, error)
            return [NO_DRAFT] * len(asked)

    def _drop(self, proposer: Proposer, error: Exception) -> None:
        logger.error("speculation method %r failed; requests go on without it", proposer.name, exc_info=error)
        self._quick = [other for other in self._quick if other is not proposer]
        self._model = None if self._model is proposer else self._model

    def _forget_ended(self) -> None:
        for state in [state for state in self._outlooks if state.status is RequestStatus.ENDED]:
            del self._outlooks[state]
            for proposer in self._proposers():
                proposer.forget(state)


def _with_predicted(progress: RequestProgress, num_accepted: int, num_rejected: int) -> RequestProgress:
    return replace(progress, num_accepted_predicted=num_accepted, num_rejected_predicted=num_rejected)
