"""What drafts tokens, and what it learns of each step. Shapes: L layers, K rows and W width of hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import HiddenStates, StepPlan

if TYPE_CHECKING:
    import torch


class Draft(NamedTuple):
    """Tokens proposed to follow a request's newest one."""

    token_ids: Sequence[int] = ()
    evidence: int = 0
    """How well founded the draft is, as a small number of the proposer's own (the n-gram's match length, for example). The controller
    keeps acceptance apart by it. A proposer without such knowledge leaves 0."""


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """A step whose tokens are already appended to its requests."""

    plan: StepPlan
    """Its `hidden` says which rows were kept."""
    num_accepted: Sequence[int]
    """Of each chunk: how many of its drafts were accepted. KV of positions up to `chunk.start + chunk.num_tokens - len(chunk.draft_ids) +
    num_accepted` (exclusive) belongs to the request's tokens; what lies behind is overwritten."""
    hidden_LKW: torch.Tensor | None = None
    """float32, the rows of all chunks' `plan.hidden.positions` one after the other."""


class Proposer(Protocol):
    """Drafts tokens for decoding requests. Every call is made by the engine's thread, between two steps of the target model.

    A draft is a guess: it is verified by the target's own draws, so a proposer can change the speed of an answer and nothing else.
    Requests are read only, but for drafts that a call appends and takes back (`DraftDraws`). A proposer owns whatever it keeps for a
    request (indices, KV in tensors of its own whose blocks are those of `state.block_ids`) until `forget`.
    """

    @property
    def name(self) -> str:
        """The method, as in the configuration and the metrics."""

    @property
    def runs_a_model(self) -> bool:
        """Whether drafting takes noticeable time. If so, the controller measures it and decides the number of drafts before it asks."""

    def propose(self, states: Sequence[RequestState], budgets: Sequence[int]) -> Sequence[Draft]:
        """One draft of at most `budgets[i]` (at least 1) tokens for each request. Each has caught up: KV of all tokens but the newest ones
        of this step is computed. Slots for all tokens and, if `runs_a_model`, `budgets[i]` more are in `state.block_ids`."""

    def wants_hidden(self, plan: StepPlan) -> HiddenStates | None:
        """Hidden states of the target that the next step, `plan` with its drafts, must keep; None costs nothing."""

    def observe(self, step: ObservedStep) -> None:
        """Called after each step. Requests that ended with it are included, and forgotten afterwards."""

    def forget(self, state: RequestState) -> None:
        """Called once for each request that ended after it was in a step. Preempted requests are not forgotten, but their blocks
        change: `state.num_preemptions` tells."""
