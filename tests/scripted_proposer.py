"""A proposer whose drafts a test writes, and a speculator that uses every draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replicas.scheduling.draft_slots import DraftSlots
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import HiddenStates, StepPlan
from replicas.speculation.controller import Controller
from replicas.speculation.proposer import Draft, ObservedStep, Proposer
from replicas.speculation.speculator import Speculator
from replicas.speculation.step_cost import StepCost


class ScriptedProposer:
    """Drafts what `draft(state, budget)` says, and remembers what it is told."""

    def __init__(self, draft: Callable[[RequestState, int], Sequence[int]], *, name: str = "scripted", runs_a_model: bool = False) -> None:
        self._draft = draft
        self.name, self.runs_a_model = name, runs_a_model
        self.asked: list[tuple[RequestState, int]] = []
        self.observed: list[ObservedStep] = []
        self.forgotten: list[RequestState] = []
        self.hidden: HiddenStates | None = None

    def propose(self, states: Sequence[RequestState], budgets: Sequence[int]) -> Sequence[Draft]:
        self.asked += zip(states, budgets, strict=True)
        return [Draft(self._draft(state, budget)[:budget]) for state, budget in zip(states, budgets, strict=True)]

    def wants_hidden(self, plan: StepPlan) -> HiddenStates | None:
        return self.hidden

    def observe(self, step: ObservedStep) -> None:
        self.observed.append(step)

    def forget(self, state: RequestState) -> None:
        self.forgotten.append(state)


def eager_speculator(slots: DraftSlots, *proposers: Proposer, max_tokens: int = 8) -> Speculator:
    """Verifies all drafts that fit, however often they were wrong: its steps cost the same whatever they hold."""
    cost = StepCost(num_rows=(1,), row_s=(1.0,))
    return Speculator(proposers, Controller(cost), slots, max_tokens=max_tokens, clock=lambda: 0.0)
