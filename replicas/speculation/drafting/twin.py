"""The target with smaller weights drafts for itself, on the target's own KV (after QuantSpec, arXiv 2502.10424)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.model.runner import ModelRunner
from replicas.sampling.sampler import Sampler
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import HiddenStates, StepPlan
from replicas.speculation.drafting.draft_draws import DraftDraws
from replicas.speculation.drafting.model_rows import ModelRows, run_rows
from replicas.speculation.proposer import Draft, ObservedStep


class TwinProposer:
    """Owns the twin's runner, which writes to the target's KV, and nothing of any request.

    It writes only behind the tokens that the target has computed. The step that verifies the drafts computes the same positions and
    overwrites them before it reads any, so that every result of the target comes from its own KV.
    """

    name = "twin"
    runs_a_model = True

    def __init__(self, twin: ModelRunner, block_size: int, sampler: Sampler) -> None:
        self._twin, self._block_size, self._sampler = twin, block_size, sampler

    @torch.inference_mode()
    def propose(self, states: Sequence[RequestState], budgets: Sequence[int]) -> Sequence[Draft]:
        with DraftDraws.of(self._sampler, states, budgets) as draws:
            starts = [state.num_computed_tokens for state in states]
            while draws.open:
                rows = [
                    ModelRows(token_ids=state.token_ids[starts[index] :], end=len(state.token_ids), block_ids=state.block_ids)
                    for index, state in ((index, states[index]) for index in draws.open)
                ]
                for index in draws.open:
                    starts[index] = len(states[index].token_ids)
                draws.draw(run_rows(self._twin, rows, self._block_size))
        return [Draft(token_ids) for token_ids in draws.token_ids]

    def wants_hidden(self, plan: StepPlan) -> HiddenStates | None:
        return None

    def observe(self, step: ObservedStep) -> None:
        """Nothing to learn: the target has overwritten the drafts' KV with its own."""

    def forget(self, state: RequestState) -> None:
        """Nothing is kept."""
