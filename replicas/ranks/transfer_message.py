"""Messages between the ranks of a replica about handoffs. They are JSON: nothing is pickled, and a block id takes fewer bytes than
an integer of fixed size."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvcache.handoff import HeadShare, KVHandoff
from kvcache.ownership import TransferRef
from kvcache.transfer.pull import PullOutcome


@dataclass(frozen=True, slots=True)
class Offer:
    """Opens blocks that will hold `num_tokens` tokens for reading, as far as they are computed."""

    ref: TransferRef
    block_ids: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The first `num_tokens` tokens of an offer are in memory once the steps sent before this message have ended."""

    ref: TransferRef
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Completed:
    """The prefill of an offer has ended and generated `output_ids`."""

    ref: TransferRef
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartPull:
    """Starts the pull of this rank's heads. The handoff comes without its block ids, which only the source's logs need."""

    pull: int
    handoff: KVHandoff

    @classmethod
    def of(cls, pull: int, handoff: KVHandoff) -> StartPull:
        return cls(pull, replace(handoff, block_ids=()))


@dataclass(frozen=True, slots=True)
class Reserve:
    """Gives a pull its blocks: `block_ids[i]` takes block `first + i` of the handoff."""

    pull: int
    ref: TransferRef
    block_ids: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class CancelPull:
    pull: int
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Closes a transfer: no read or write may begin. The rank answers `Closed` when the last one has ended."""

    ref: TransferRef


@dataclass(frozen=True, slots=True)
class Serves:
    """From a rank, before it is ready: its heads and the address at which they can be read."""

    share: HeadShare


@dataclass(frozen=True, slots=True)
class Closed:
    """From a rank, once per transfer: it neither reads nor writes for it any more."""

    ref: TransferRef


@dataclass(frozen=True, slots=True)
class Pulled:
    """From a rank, once per pull: its outcome. The pull's transfer, if any, was closed before."""

    pull: int
    outcome: PullOutcome


Order = Offer | Computed | Completed | StartPull | Reserve | CancelPull | Close
Answer = Serves | Closed | Pulled

_MESSAGES: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (Offer, Computed, Completed, StartPull, Reserve, CancelPull, Close, Serves, Closed, Pulled)
}


def encode(message: Order | Answer) -> bytes:
    return json.dumps([type(message).__name__, _fields(message)], default=_fields, separators=(",", ":")).encode()


def decode(payload: bytes) -> Any:
    """An order or an answer. Raises ValueError for a message that this version did not write."""
    try:
        name, values = json.loads(payload)
        return _MESSAGES[name](**{key: _PARSERS.get(key, _same)(value) for key, value in values.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a transfer message is not of this version: {error!r}") from error


def _fields(one: Any) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in fields(one)}


def _handoff(values: Mapping[str, Any]) -> KVHandoff:
    first, end = values["layers"]
    shares = tuple(HeadShare(**share) for share in values["shares"])
    return KVHandoff(**{**values, "layers": (first, end), "block_ids": tuple(values["block_ids"]), "shares": shares})


def _outcome(values: Mapping[str, Any]) -> PullOutcome:
    return PullOutcome(**{**values, "output_ids": tuple(values["output_ids"])})


def _same(value: Any) -> Any:
    return value


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "ref": lambda value: TransferRef(*value),
    "block_ids": tuple,
    "output_ids": tuple,
    "handoff": _handoff,
    "share": lambda value: HeadShare(**value),
    "outcome": _outcome,
}
