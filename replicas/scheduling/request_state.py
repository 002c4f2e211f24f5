"""A request inside the engine."""

from __future__ import annotations

from enum import Enum

from kvcache.prefix_cache import BlockKeyChain
from replicas.request import GenerationRequest


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class RequestState:
    """Owns the tokens and the block table of one accepted request; changed by the Scheduler alone.

    Always: `num_computed_tokens <= len(token_ids)`; KV for the first `num_computed_tokens` tokens is in `block_ids`, and
    a waiting request holds no block. There are no phases: a request is done catching up when only its newest token is
    not computed yet.
    """

    __slots__ = (
        "arrival_number", "awaits_load", "block_ids", "chain", "is_loading", "key", "max_num_tokens", "num_cached_tokens",
        "num_computed_tokens", "num_preemptions", "num_scored", "num_to_score", "request", "status", "stop_token_ids", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerationRequest,
        *,
        arrival_number: int,
        chain: BlockKeyChain,
        stop_token_ids: frozenset[int],
        max_num_tokens: int,
    ) -> None:
        self.request = request
        self.key = request.key
        self.arrival_number = arrival_number
        self.chain = chain
        self.stop_token_ids = stop_token_ids
        self.max_num_tokens = max_num_tokens  # prompt + output at which it ends by length
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_to_score = len(request.prompt_ids) - 1 if request.wants_prompt_logprobs else 0  # leading positions, for prompt_logprobs
        self.num_scored = 0  # of these, the ones whose logits were taken; a preemption does not undo it
        self.status = RequestStatus.WAITING
        self.awaits_load = False  # waits for blocks into which another replica's KV shall go
        self.is_loading = False  # runs, but its KV is on the way: nothing to compute until then

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        num_computed = self.num_computed_tokens
        return num_computed > 0 and len(self.token_ids) - num_computed == 1 and not self.is_loading

    @property
    def urgency(self) -> tuple[int, int]:
        """Smaller goes first. A total order that never changes, so that no two requests preempt each other in turns."""
        return (self.request.priority, self.arrival_number)
