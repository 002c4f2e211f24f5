"""What moves bytes between two replicas, and what a receiver needs of a source. Transports differ behind these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvcache.handoff import KVHandoff
from kvcache.wire import WireFormat


class LinkLost(RuntimeError):
    """The other side is gone, silent past a deadline, or talks nonsense. Not raised when it says no: that is HandoffFailed."""


class DataLink(Protocol):
    """Bytes from one source to one receiver, message after message. Every wait has a deadline; LinkLost ends the link."""

    def announce(self, data: torch.Tensor) -> str:
        """Source, before the receiver is told of a message: a ticket for it, empty where messages come in order."""
        ...

    def send(self, data: torch.Tensor) -> None:
        """Source, after the receiver was told. Returns when `data` may be reused."""
        ...

    def settle(self) -> None:
        """Source, when the receiver speaks again: it has taken what was sent."""
        ...

    def receive(self, ticket: str, num_bytes: int) -> torch.Tensor:
        """Receiver: the next message, uint8."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Makes links on demand, one for each pair. The invitation reaches the receiver over the control channel."""

    name: str

    def invite(self) -> dict[str, Any]:
        """Source: what a receiver must know to join; JSON."""
        ...

    def accept(self, invitation: dict[str, Any]) -> DataLink:
        """Source: waits for the receiver. Raises LinkLost."""
        ...

    def join(self, invitation: dict[str, Any]) -> DataLink:
        """Receiver. Raises LinkLost."""
        ...


TransportMaker = Callable[[torch.device], Transport]
"""For blocks on that device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBatch:
    """Blocks `first .. first + num_blocks - 1` of a handoff's table; none when nothing new became readable in time."""

    first: int
    num_blocks: int
    data: torch.Tensor
    """Flat, in the wire format that was asked for."""
    layout_id: str
    is_computed: bool
    """The prefill had ended when this was read."""
    output_ids: tuple[int, ...]
    """What the source generated, known when `is_computed`."""
    waited_s: float
    """How long the source waited for something to read."""


class SourceSession(Protocol):
    """A receiver's talk with one source about one handoff at a time. One thread; `close` from any.

    Raises HandoffFailed when the source says no, LinkLost when it cannot be heard.
    """

    def read(self, handoff: KVHandoff, form: WireFormat, first: int, wait_s: float) -> KVBatch:
        """The blocks from `first` on that are readable, after at most `wait_s`; the lease is renewed."""
        ...

    def renew(self, handoff: KVHandoff) -> None: ...

    def finish(self, handoff: KVHandoff) -> None:
        """Everything was taken: the source may free."""
        ...

    def close(self, *, is_reusable: bool = False) -> None:
        """Ends the talk; a wait in another thread fails. `is_reusable` when nothing is under way, so the link may be kept."""
        ...


class Connector(Protocol):
    """Finds the source of a handoff by the address in its share."""

    def connect(self, address: str) -> SourceSession:
        """Raises LinkLost."""
        ...
