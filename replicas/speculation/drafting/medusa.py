"""Medusa (arXiv 2401.10774): heads on the target's final hidden state, each of which predicts the token at one distance.

Only chains are drafted, one token of each head: on a CPU every further row of a verification costs. Shapes: R requests that draft,
K rows of hidden states, H hidden size, C token ids of a head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replicas.sampling.sampler import Sampler
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import NO_POSITIONS, HiddenStates, StepPlan
from replicas.speculation.drafting.draft_draws import DraftDraws
from replicas.speculation.drafting.interest import Interest
from replicas.speculation.heads.medusa_heads import MedusaHeads
from replicas.speculation.heads.target import HeadTarget
from replicas.speculation.proposer import Draft, ObservedStep


class MedusaProposer:
    """Owns, for each request, the hidden state from which its newest token was drawn."""

    name = "medusa"
    runs_a_model = True

    def __init__(self, heads: MedusaHeads, target: HeadTarget, sampler: Sampler) -> None:
        self._heads, self._sampler, self._layer = heads, sampler, target.num_layers
        self._interest = Interest()
        self._hidden: dict[RequestState, tuple[int, Tensor]] = {}  # request -> number of tokens then known, hidden state [H]

    @torch.inference_mode()
    def propose(self, states: Sequence[RequestState], budgets: Sequence[int]) -> Sequence[Draft]:
        """A request whose newest tokens were not drawn in the last observed step gets no draft."""
        self._interest.note_wish()
        ready: list[int] = []
        rows: list[Tensor] = []
        for index, state in enumerate(states):
            num_known, hidden_H = self._hidden.get(state, (0, None))
            if hidden_H is not None and num_known == len(state.token_ids):
                ready.append(index)
                rows.append(hidden_H)
        drafts = [Draft()] * len(states)
        if not ready:
            return drafts
        wanted = [min(budgets[index], self._heads.num_heads) for index in ready]
        with DraftDraws.of(self._sampler, [states[index] for index in ready], wanted) as draws:
            for logits_RC in self._heads.logits(torch.stack(rows), max(wanted)):
                draws.draw(logits_RC[draws.open], self._heads.token_ids_C)
        for index, token_ids in zip(ready, draws.token_ids, strict=True):
            drafts[index] = Draft(token_ids)
        return drafts

    def wants_hidden(self, plan: StepPlan) -> HiddenStates | None:
        """Of the rows from which tokens are drawn, while drafts are wanted at all."""
        if not self._interest.note_step():
            return None
        positions = tuple(
            _drawn_from(chunk.logits, len(chunk.draft_ids)) if chunk.samples and chunk.state.request.speculates else NO_POSITIONS
            for chunk in plan.chunks
        )
        return HiddenStates(layers=(self._layer,), positions=positions) if any(positions) else None

    def observe(self, step: ObservedStep) -> None:
        """Keeps the row from which each request's newest token was drawn."""
        if step.hidden_LKW is None or step.plan.hidden is None:
            return
        hidden_KH = step.hidden_LKW[step.plan.hidden.layers.index(self._layer)]
        first_row = 0
        for chunk, positions in zip(step.plan.chunks, step.plan.hidden.positions, strict=True):
            num_known = len(chunk.state.token_ids)
            if num_known - 2 in positions:
                self._hidden[chunk.state] = (num_known, hidden_KH[first_row + num_known - 2 - positions.start].clone())
            first_row += len(positions)

    def forget(self, state: RequestState) -> None:
        self._hidden.pop(state, None)


def _drawn_from(logits: range, num_drafts: int) -> range:
    """The positions from which a sampling chunk draws tokens."""
    return range(logits.stop - 1 - num_drafts, logits.stop)
