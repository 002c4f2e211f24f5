"""A drafter's own KV, in blocks with the ids of the target's. Free of torch.

The drafter has its own tensors, but no block tables: block b of a request is row b there too, so prefix sharing, growth and preemption
are those of the target. Only what a block holds has to be known: the target may have filled it while the drafter did not run.
"""

from __future__ import annotations

from collections.abc import Sequence

from replicas.scheduling.request_state import RequestState


class ShadowBlocks:
    """Knows which blocks the drafter has filled, and for which tokens. Wrong knowledge would cost accepted drafts, nothing else."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._content: dict[int, int] = {}  # block id -> hash of all tokens up to the block's end

    def holds(self, block_id: int, content: int) -> bool:
        return self._content.get(block_id) == content

    def begin(self, block_id: int) -> None:
        """The first slot of the block is about to be overwritten."""
        self._content.pop(block_id, None)

    def complete(self, block_id: int, content: int) -> None:
        self._content[block_id] = content


class ShadowSequence:
    """The entries of one request in the drafter's KV: those of positions in `table`, `num_entries` in all, without gaps in a block.

    Blocks that the drafter did not fill are left out of `table`. Entries keep the position with which they were computed, so attention
    over the others is right; the drafter only knows less of the context.
    """

    def __init__(self, state: RequestState, start: int, blocks: ShadowBlocks, *, takes_holes: bool) -> None:
        """`start` is the number of tokens whose KV the target had before the drafter saw the request. With `takes_holes` the drafter will
        begin behind them; otherwise behind the first block that is not filled."""
        self.state = state
        self.num_preemptions = state.num_preemptions
        self._blocks = blocks
        self._chain: list[int] = []  # of each block in turn: hash of all tokens up to its end
        self.table: list[int] = []
        for index in range(start // blocks.block_size):
            if blocks.holds(state.block_ids[index], self._content(index)):
                self.table.append(state.block_ids[index])
            elif not takes_holes:
                break
        self.num_entries = len(self.table) * blocks.block_size
        self.next_position = _next_multiple(start, blocks.block_size) if takes_holes else self.num_entries
        """Position of the next entry."""

    @property
    def is_current(self) -> bool:
        """False once the request has lost the blocks that it had."""
        return self.num_preemptions == self.state.num_preemptions and bool(self.state.block_ids)

    def skip_to(self, position: int) -> None:
        """Nothing is known of the positions in front of `position`: the next entry starts a block."""
        if position > self.next_position:
            self.next_position = _next_multiple(position, self._blocks.block_size)
            if partial := self.num_entries % self._blocks.block_size:
                self.table.pop()
                self.num_entries -= partial

    def extend(self, num_entries: int) -> None:
        """Adds entries, which the drafter's next forward pass writes, at `next_position` and behind it."""
        size = self._blocks.block_size
        for position in range(self.next_position, self.next_position + num_entries):
            block_id = self.state.block_ids[position // size]
            if position % size == 0:
                self.table.append(block_id)
                self._blocks.begin(block_id)
            if position % size == size - 1:
                self._blocks.complete(block_id, self._content(position // size))
        self.num_entries += num_entries
        self.next_position += num_entries

    def table_with(self, num_more: int) -> Sequence[int]:
        """The table for `num_more` entries that are not kept."""
        size = self._blocks.block_size
        first = -(-self.next_position // size)
        last = -(-(self.next_position + num_more) // size)
        return [*self.table, *self.state.block_ids[first:last]]

    def _content(self, index: int) -> int:
        size, token_ids = self._blocks.block_size, self.state.token_ids
        while len(self._chain) <= index:
            start = len(self._chain) * size
            self._chain.append(hash((self._chain[-1] if self._chain else None, tuple(token_ids[start : start + size]))))
        return self._chain[index]


def _next_multiple(position: int, size: int) -> int:
    return -(-position // size) * size
