"""EAGLE (arXiv 2401.15077, 2503.01840): one layer that continues the target's hidden states. Only chains are drafted.

Shapes: T packed rows, K rows of hidden states, H the head's hidden size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcache.tensors import KVTensors
from replicas.attention.backend import AttentionBackend
from replicas.attention.step_tensors import StepTensors
from replicas.sampling.sampler import Sampler
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_arrays import StepArrays
from replicas.scheduling.step_plan import NO_POSITIONS, HiddenStates, StepPlan
from replicas.speculation.drafting.draft_draws import DraftDraws
from replicas.speculation.drafting.interest import RESTING_STEPS, Interest
from replicas.speculation.drafting.shadow_sequence import ShadowBlocks, ShadowSequence
from replicas.speculation.heads.eagle_layer import EagleLayer
from replicas.speculation.proposer import Draft, ObservedStep

MAX_PENDING_ROWS = 64
"""Rows of decodes that wait for the next draft, which computes them in the same pass as its own first row."""


class _Features:
    """What the head knows of one request."""

    def __init__(self, sequence: ShadowSequence) -> None:
        self.sequence = sequence
        self.pending: list[Tensor] = []  # fused states [H] of positions from sequence.next_position on
        self.newest: tuple[int, Tensor] | None = None  # position and head state [H] of the last entry
        self.wanted_at = len(sequence.state.token_ids)  # number of tokens when drafts were last wanted, or when it began

    @property
    def is_resting(self) -> bool:
        return len(self.sequence.state.token_ids) - self.wanted_at > RESTING_STEPS


class EagleProposer:
    """Owns the head's KV and, for each request, the head's state at its newest position.

    Entries are computed from the target's hidden states for every position that it computes, prompts included; those of drafts are
    overwritten by them. Where drafts are not wanted for long, of a request or at all, no hidden states are kept; a request continues at
    the next block when they are wanted again.
    """

    name = "eagle"
    runs_a_model = True

    def __init__(self, layer: EagleLayer, kv: KVTensors, backend: AttentionBackend, sampler: Sampler) -> None:
        self._layer, self._kv, self._backend, self._sampler = layer, kv, backend, sampler
        self._blocks = ShadowBlocks(kv.block_size)
        self._features: dict[RequestState, _Features] = {}
        self._interest = Interest()

    @torch.inference_mode()
    def propose(self, states: Sequence[RequestState], budgets: Sequence[int]) -> Sequence[Draft]:
        """A request of whose newest position the head knows nothing gets no draft."""
        self._interest.note_wish()
        self._flush()
        drafts = [Draft()] * len(states)
        ready: list[int] = []
        newest: list[Tensor] = []
        for index, state in enumerate(states):
            features = self._features.get(state)
            if features is None:
                continue
            features.wanted_at = len(state.token_ids)
            if features.newest is not None and features.sequence.is_current:
                position, state_H = features.newest
                if position == len(state.token_ids) - 2:
                    ready.append(index)
                    newest.append(state_H)
        if not ready:
            return drafts
        sequences = [self._features[states[index]].sequence for index in ready]
        with DraftDraws.of(self._sampler, [states[index] for index in ready], [budgets[index] for index in ready]) as draws:
            out_TH, rows = torch.stack(newest), list(draws.open)
            for num_drafted in range(1, max(budgets) + 1):
                token_ids = draws.draw(self._layer.logits(out_TH), self._layer.token_ids_C)
                if not token_ids:
                    break
                kept = [rows.index(row) for row in draws.open]
                rows = list(draws.open)
                state_TH = self._layer.recycled(out_TH[kept])
                out_TH = self._forward([sequences[row] for row in rows], token_ids, state_TH, num_drafted)
        for index, token_ids in zip(ready, draws.token_ids, strict=True):
            drafts[index] = Draft(token_ids)
        return drafts

    def wants_hidden(self, plan: StepPlan) -> HiddenStates | None:
        """Every position that the step computes, but of requests that want no drafts."""
        if not self._interest.note_step():
            return None
        positions = tuple(
            range(chunk.start, chunk.start + chunk.num_tokens) if self._is_followed(chunk.state) else NO_POSITIONS for chunk in plan.chunks
        )
        return HiddenStates(layers=self._layer.settings.layer_ids, positions=positions) if any(positions) else None

    @torch.inference_mode()
    def observe(self, step: ObservedStep) -> None:
        """Keeps the rows of positions whose next token is known now: all but those of refused drafts."""
        if step.hidden_LKW is None or step.plan.hidden is None:
            return
        places = [step.plan.hidden.layers.index(layer) for layer in self._layer.settings.layer_ids]
        fused_KH = self._layer.fused(step.hidden_LKW[places])
        first_row = 0
        has_prompts = False
        for chunk, positions in zip(step.plan.chunks, step.plan.hidden.positions, strict=True):
            if positions and chunk.state.block_ids:  # without blocks it has ended
                self._keep(chunk.state, chunk.start, positions, fused_KH[first_row : first_row + len(positions)])
                has_prompts |= chunk.is_prefill
            first_row += len(positions)
        if has_prompts or sum(len(features.pending) for features in self._features.values()) >= MAX_PENDING_ROWS:
            self._flush()

    def forget(self, state: RequestState) -> None:
        self._features.pop(state, None)

    def _is_followed(self, state: RequestState) -> bool:
        features = self._features.get(state)
        return state.request.speculates and (features is None or not features.is_resting)

    def _keep(self, state: RequestState, start: int, positions: range, fused_PH: Tensor) -> None:
        features = self._features.get(state)
        if features is None or not features.sequence.is_current:
            if start:
                self._flush()  # a request of the same step may have filled the blocks that this one shares
            features = self._features[state] = _Features(ShadowSequence(state, start, self._blocks, takes_holes=True))
        sequence = features.sequence
        if positions.start > sequence.next_position + len(features.pending):
            features.pending.clear()  # no pass can compute them any more with what lies between
            sequence.skip_to(positions.start)
        first = sequence.next_position + len(features.pending)
        last = min(positions.stop, len(state.token_ids) - 1)
        features.pending += fused_PH[max(first - positions.start, 0) : max(last - positions.start, 0)]

    def _flush(self) -> None:
        """Computes all pending rows in one pass."""
        waiting = [features for features in self._features.values() if features.pending]
        for features in [features for features in waiting if not features.sequence.is_current]:
            features.pending.clear()  # preempted: its blocks belong to others
            waiting.remove(features)
        if not waiting:
            return
        token_ids: list[int] = []
        counts = [len(features.pending) for features in waiting]
        for features, num_rows in zip(waiting, counts, strict=True):
            first = features.sequence.next_position
            token_ids += features.sequence.state.token_ids[first + 1 : first + 1 + num_rows]
            features.sequence.extend(num_rows)
        rows = torch.stack([state_H for features in waiting for state_H in features.pending])
        out_TH = self._forward([features.sequence for features in waiting], token_ids, rows, 0, counts)
        end = 0
        for features, num_rows in zip(waiting, counts, strict=True):
            end += num_rows
            features.newest = (features.sequence.next_position - 1, out_TH[end - 1])
            features.pending.clear()

    def _forward(
        self, sequences: Sequence[ShadowSequence], token_ids: Sequence[int], state_TH: Tensor, num_drafted: int, counts: Sequence[int] = ()
    ) -> Tensor:
        """Runs the layer on each sequence's newest `counts` entries or, without `counts`, on the row of its draft number `num_drafted`."""
        lens = counts or [1] * len(sequences)
        contexts = [sequence.num_entries + num_drafted for sequence in sequences]
        step = _step([list(sequence.table_with(num_drafted)) for sequence in sequences], lens, contexts, self._kv)
        ends = [sequence.next_position + num_drafted for sequence in sequences]
        positions = [position for end, num_rows in zip(ends, lens, strict=True) for position in range(end - num_rows, end)]
        device = self._kv.device
        return self._layer.forward(
            torch.tensor(token_ids, device=device), state_TH, torch.tensor(positions, device=device), step, self._backend, self._kv
        )


def _step(tables: Sequence[Sequence[int]], lens: Sequence[int], contexts: Sequence[int], kv: KVTensors) -> StepTensors:
    """A packed step over these block tables, of which only attention's part is used."""
    arrays = StepArrays.with_blocks(
        token_ids_T=np.zeros(sum(lens), dtype=np.int32),
        lens_R=np.array(lens, dtype=np.int32),
        context_lens_R=np.array(contexts, dtype=np.int32),
        blocks=np.array([block_id for table in tables for block_id in table], dtype=np.int32),
        logit_rows_N=np.zeros(0, dtype=np.int32),
        block_size=kv.block_size,
    )
    return StepTensors.from_arrays(arrays).to(kv.device)
