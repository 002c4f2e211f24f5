"""Drafts of a simulated replica: accepted with given chances, chosen by the engine's own controller."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from replicas.scheduling.draft_slots import DraftSlots
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import HiddenStates, ScheduledChunk, StepPlan
from replicas.speculation.controller import Controller
from replicas.speculation.proposer import Draft, ObservedStep
from replicas.speculation.speculator import Speculator
from router.simulator.hardware import StepTimer

OUTPUT_TOKEN = -1
"""Every generated token. It differs from all tokens of traces, so generated tokens never match a prompt's prefix."""
_WRONG_TOKEN = -2


class SimulatedDrafts:
    """A Proposer that always has a draft. Whether its tokens are right is drawn when they are drafted."""

    name = "simulated"
    runs_a_model = False

    def __init__(self, acceptance: Sequence[float], seed: int) -> None:
        """`acceptance[i]` is the chance that draft i is right if all before it are; the last holds for those behind it too."""
        self._acceptance = acceptance
        self._random = Random(seed)

    def propose(self, states: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(budget) for budget in budgets]

    def _draft(self, budget: int) -> Draft:
        num_right = 0
        while num_right < budget and self._random.random() < self._acceptance[min(num_right, len(self._acceptance) - 1)]:
            num_right += 1
        return Draft([OUTPUT_TOKEN] * num_right + [_WRONG_TOKEN] * (budget - num_right))

    def wants_hidden(self, plan: StepPlan) -> HiddenStates | None:
        return None

    def observe(self, step: ObservedStep) -> None:
        pass

    def forget(self, state: RequestState) -> None:
        pass


def simulated_speculator(
    acceptance: Sequence[float], timer: StepTimer, slots: DraftSlots, *, max_rows: int, max_tokens: int, seed: int
) -> Speculator | None:
    """None without chances. Drafting itself takes no time; verifying it takes what the rows take."""
    if not acceptance:
        return None
    controller = Controller(timer.step_cost(max_rows))
    return Speculator([SimulatedDrafts(acceptance, seed)], controller, slots, max_tokens=max_tokens, clock=lambda: 0.0)


def verified(chunk: ScheduledChunk) -> list[int]:
    """The tokens that a chunk gets: its drafts up to the first wrong one, and one more."""
    num_right = next((place for place, token_id in enumerate(chunk.draft_ids) if token_id != OUTPUT_TOKEN), len(chunk.draft_ids))
    return [OUTPUT_TOKEN] * (num_right + 1)
