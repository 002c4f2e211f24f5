"""Interfaces that every transport implements: links that move bytes between two replicas, and sessions with a source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvcache.handoff import KVHandoff
from kvcache.wire import WireFormat


class LinkLost(RuntimeError):
    """The peer is gone, silent past a deadline, or sends invalid messages. Not raised when it refuses: that is HandoffFailed."""


class DataLink(Protocol):
    """Bytes from one source to one receiver, message after message. Every wait has a deadline; LinkLost ends the link."""

    def announce(self, data: torch.Tensor) -> str:
        """Source, before it tells the receiver of a message: a ticket for the message; empty for links that deliver in order."""
        ...

    def send(self, data: torch.Tensor) -> None:
        """Source, after it told the receiver. Returns when `data` may be reused."""
        ...

    def settle(self) -> None:
        """Source, when the next request of the receiver arrives, which means that it has received everything sent."""
        ...

    def receive(self, ticket: str, num_bytes: int) -> torch.Tensor:
        """Receiver: the next message, uint8."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Makes links on demand, one per pair. The control channel carries the invitation to the receiver."""

    name: str

    def invite(self) -> dict[str, Any]:
        """Source: the data that a receiver needs to join, as JSON values."""
        ...

    def accept(self, invitation: dict[str, Any]) -> DataLink:
        """Source: waits for the receiver. Raises LinkLost."""
        ...

    def join(self, invitation: dict[str, Any]) -> DataLink:
        """Receiver: connects to the source. Raises LinkLost."""
        ...


TransportMaker = Callable[[torch.device], Transport]
"""Makes a transport for blocks on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBatch:
    """Blocks `first .. first + num_blocks - 1` of a handoff's table; `num_blocks` is 0 when nothing became readable in time."""

    first: int
    num_blocks: int
    data: torch.Tensor
    """Flat; the requested layers and heads in the layout `layout_id`."""
    layout_id: str
    is_computed: bool
    """Whether the prefill had ended when this was read."""
    output_ids: tuple[int, ...]
    """Tokens that the source generated; known when `is_computed`."""
    waited_s: float
    """How long the source waited until there was something to read."""


class SourceSession(Protocol):
    """A receiver's session with one source, for one handoff at a time. One thread uses it; any thread may call `close`.

    Methods raise HandoffFailed when the source refuses, and LinkLost when it cannot be reached.
    """

    def read(self, handoff: KVHandoff, form: WireFormat, first: int, wait_s: float) -> KVBatch:
        """The readable blocks from `first` on, after waiting at most `wait_s` for one; renews the lease."""
        ...

    def renew(self, handoff: KVHandoff) -> None: ...

    def finish(self, handoff: KVHandoff) -> None:
        """Tells the source that everything was received, so that it may free the blocks."""
        ...

    def close(self, *, is_reusable: bool = False) -> None:
        """Ends the session; a wait in another thread fails. `is_reusable`: no message is under way, so the link may be kept."""
        ...


class Connector(Protocol):
    """Finds the source of a handoff by the address in its share."""

    def connect(self, address: str) -> SourceSession:
        """Raises LinkLost."""
        ...
