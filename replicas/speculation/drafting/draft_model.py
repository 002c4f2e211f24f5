"""A small model drafts (arXiv 2211.17192, without its ratio test: drafts are verified by equality). Letters: R requests that draft, C
tokens that both models have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from replicas.model.runner import ModelRunner
from replicas.sampling.sampler import Sampler
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import HiddenStates, StepPlan
from replicas.speculation.drafting.draft_draws import DraftDraws
from replicas.speculation.drafting.model_rows import ModelRows, run_rows
from replicas.speculation.drafting.shadow_sequence import ShadowBlocks, ShadowSequence
from replicas.speculation.drafting.token_map import TokenMap
from replicas.speculation.proposer import Draft, ObservedStep

MAX_TOKENS_BEHIND = 32
"""A request whose draft model lacks the KV of more tokens than this gets no draft until steps in between have caught up."""
CATCH_UP_TOKENS = 128
"""Tokens that the draft model computes after a step, all requests together, to catch up."""


class _Follower:
    """The draft model's view of one request."""

    def __init__(self, sequence: ShadowSequence) -> None:
        self.sequence = sequence
        self.draft_ids: list[int] = []  # drafts whose KV the last drafting wrote, behind the entries of `sequence`
        self.block_ids: list[int] = []  # the blocks that it wrote to

    @property
    def num_behind(self) -> int:
        return len(self.sequence.state.token_ids) - self.sequence.next_position


class DraftModelProposer:
    """Owns the draft model's runner and its KV, whose blocks have the ids of the target's.

    A prompt is computed only once drafts are wanted, a part after each step, so that no first token waits for it. After a verification
    the KV of accepted drafts stays; where all were accepted, the last one's is still to be computed.
    """

    name = "draft_model"
    runs_a_model = True

    def __init__(self, runner: ModelRunner, block_size: int, sampler: Sampler, tokens: TokenMap, max_positions: int | None = None) -> None:
        """`tokens` maps the models' ids; `max_positions` is the draft model's longest sequence."""
        self._runner, self._sampler, self._tokens = runner, sampler, tokens
        self._max_positions = max_positions
        self._blocks = ShadowBlocks(block_size)
        self._followers: dict[RequestState, _Follower] = {}

    @torch.inference_mode()
    def propose(self, states: Sequence[RequestState], budgets: Sequence[int]) -> Sequence[Draft]:
        drafts = [Draft()] * len(states)
        followers = [self._follower_of(state) for state in states]
        ready = [index for index, state in enumerate(states) if self._can_draft(followers[index], len(state.token_ids) + budgets[index])]
        if not ready:
            return drafts
        with DraftDraws.of(self._sampler, [states[index] for index in ready], [budgets[index] for index in ready]) as draws:
            starts = [followers[index].sequence.next_position for index in ready]
            num_known = [len(states[index].token_ids) for index in ready]
            while draws.open:
                rows: list[ModelRows] = []
                for place in draws.open:
                    state = states[ready[place]]
                    rows.append(self._rows(state, starts[place], len(state.token_ids)))
                    starts[place] = len(state.token_ids)
                draws.draw(*self._known(run_rows(self._runner, rows, self._blocks.block_size)))
        for place, index in enumerate(ready):
            follower, token_ids = followers[index], draws.token_ids[place]
            follower.sequence.extend(num_known[place] - follower.sequence.next_position)
            follower.draft_ids = token_ids[: starts[place] - num_known[place]]
            follower.block_ids = list(states[index].block_ids)
            drafts[index] = Draft(token_ids)
        return drafts

    def wants_hidden(self, plan: StepPlan) -> HiddenStates | None:
        return None

    @torch.inference_mode()
    def observe(self, step: ObservedStep) -> None:
        """Computes a part of the prompts for which drafts were wanted."""
        room = CATCH_UP_TOKENS
        rows: list[ModelRows] = []
        for chunk in step.plan.chunks:
            follower = self._followers.get(chunk.state)
            if follower is None or not chunk.state.block_ids or not room:
                continue
            follower = self._follower_of(chunk.state)
            if (num_behind := follower.num_behind) > MAX_TOKENS_BEHIND:
                num_tokens = min(room, num_behind - 1)
                room -= num_tokens
                first = follower.sequence.next_position
                follower.sequence.extend(num_tokens)
                rows.append(self._rows(chunk.state, first, follower.sequence.next_position))
        if rows:
            run_rows(self._runner, rows, self._blocks.block_size)

    def forget(self, state: RequestState) -> None:
        self._followers.pop(state, None)

    def _follower_of(self, state: RequestState) -> _Follower:
        """With the drafts counted that were accepted since."""
        follower = self._followers.get(state)
        if follower is None or not follower.sequence.is_current:
            sequence = ShadowSequence(state, state.num_computed_tokens, self._blocks, takes_holes=False)
            follower = self._followers[state] = _Follower(sequence)
        first = follower.sequence.next_position
        new_ids = state.token_ids[first:-1]  # the newest is computed again if need be: its logits are wanted
        num_kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(follower.draft_ids, new_ids, strict=False)))
        last_block = -(-(first + num_kept) // self._blocks.block_size)
        if num_kept and state.block_ids[:last_block] == follower.block_ids[:last_block]:
            follower.sequence.extend(num_kept)
        follower.draft_ids = []
        return follower

    def _can_draft(self, follower: _Follower, num_tokens: int) -> bool:
        fits = self._max_positions is None or num_tokens <= self._max_positions
        return fits and follower.num_behind <= MAX_TOKENS_BEHIND

    def _rows(self, state: RequestState, start: int, end: int) -> ModelRows:
        token_ids: Sequence[int] = state.token_ids[start:end]
        return ModelRows(
            token_ids=token_ids if self._tokens.is_identity else self._tokens.to_draft(token_ids), end=end, block_ids=state.block_ids
        )

    def _known(self, logits_RD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [R, C] and the target's ids of their columns; None for all of its ids."""
        num_shared = self._tokens.token_ids_C.shape[0]
        if self._tokens.is_identity and logits_RD.shape[1] == num_shared == self._sampler.vocab_size:
            return logits_RD, None
        device = logits_RD.device
        return logits_RD[:, self._tokens.draft_ids_C.to(device)], self._tokens.token_ids_C.to(device)
