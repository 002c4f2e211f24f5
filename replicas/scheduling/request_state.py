"""A request inside the engine."""

from __future__ import annotations

from enum import Enum

from kvcache.prefix_cache import BlockKeyChain
from replicas.request import GenerationRequest, TokenLogprob
from replicas.sampling.sampling_state import LogitsMask, SamplingState


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class RequestState:
    """Owns the tokens (prompt and output), the position and the block table of one accepted request. Only the Scheduler changes it, with
    two exceptions: drawing and verifying drafts append tokens and take them back, and the prompt's log-probabilities are collected here
    by the sampler until the engine reports them.

    Always: `num_computed_tokens <= len(token_ids)`; KV for the first `num_computed_tokens` tokens is in `block_ids`, and
    a waiting request holds no block. There are no phases: a request has caught up, and decodes, when the only uncomputed tokens are new
    ones that no step has computed before, usually just the newest.
    """

    __slots__ = (
        "arrival_number", "awaits_draw", "awaits_load", "block_ids", "chain", "decodes_from", "is_loading", "key", "max_num_tokens",
        "num_cached_tokens", "num_computed_tokens", "num_forced_tokens", "num_preemptions", "num_scored", "num_to_score",
        "prompt_logprobs", "request", "sampling", "status", "stop_token_ids", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerationRequest,
        *,
        arrival_number: int,
        chain: BlockKeyChain,
        max_num_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        mask: LogitsMask | None = None,
    ) -> None:
        self.request = request
        self.key = request.key
        self.arrival_number = arrival_number
        self.chain = chain
        stops = frozenset(request.params.stop_token_ids)
        self.stop_token_ids = stops if request.params.ignore_eos else stops | eos_token_ids
        self.max_num_tokens = max_num_tokens  # prompt + output tokens at which the request ends with LENGTH
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        self.sampling = SamplingState(request, self.token_ids, eos_token_ids, mask)
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.num_cached_tokens = 0
        self.num_forced_tokens = 0  # output tokens of this attempt that the grammar forced, none of them drawn
        self.num_preemptions = 0
        self.num_to_score = len(request.prompt_ids) - 1 if request.wants_prompt_logprobs else 0  # leading positions, for prompt_logprobs
        self.num_scored = 0  # of num_to_score, those whose logits were read; a preemption keeps it
        self.prompt_logprobs: list[TokenLogprob] | None = [] if request.wants_prompt_logprobs else None  # None once reported
        self.status = RequestStatus.WAITING
        self.awaits_load = False  # waits for blocks that another replica's KV will fill
        self.is_loading = False  # runs, but its KV is still in transfer: nothing to compute
        self.awaits_draw = False  # all its tokens are computed; the next one is drawn once its mask is ready
        self.decodes_from = 0  # number of computed tokens from which the request decodes
        self.begin_catching_up()

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_held(self) -> bool:
        """Whether the request runs, but has nothing to compute now."""
        return self.is_loading or self.awaits_draw

    @property
    def is_decoding(self) -> bool:
        """Whether the request has caught up, however many new tokens (drawn or forced) are uncomputed."""
        return self.num_computed_tokens >= self.decodes_from and not self.is_held

    @property
    def urgency(self) -> tuple[int, int]:
        """Smaller goes first. A total order that never changes, so that two requests cannot preempt each other in turns."""
        return (self.request.priority, self.arrival_number)

    def begin_catching_up(self) -> None:
        """Called when the blocks are new: all known tokens but the newest must be computed or found in the cache before it decodes."""
        self.decodes_from = max(1, len(self.token_ids) - 1)

    def append(self, token_id: int) -> None:
        """Appends an output token; token counts and grammar advance with it."""
        self.token_ids.append(token_id)
        self.sampling.follow(token_id)

    def go_back(self, num_tokens: int) -> None:
        """Removes the newest output tokens; token counts and grammar go back too. Raises ValueError if there are fewer."""
        if not 0 <= num_tokens <= self.num_output_tokens:
            raise ValueError(f"num_tokens must be in [0, {self.num_output_tokens}], got {num_tokens}")
        if num_tokens:
            gone = self.token_ids[-num_tokens:]
            del self.token_ids[-num_tokens:]
            self.sampling.go_back(gone)
