"""What a gateway and the router say to each other in one call. Frozen data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from router.snapshot import Decision, Rejection, RoutingRequest


class RequestEnded(NamedTuple):
    """The request has ended, was cancelled or never got its decision. Of an unknown id it means nothing."""

    request_id: str
    num_output_tokens: int


class PrefillEnded(NamedTuple):
    """The prefill replica of a pair has ended every choice of the request. Of an unknown id it means nothing."""

    request_id: str


class ReplicaLost(NamedTuple):
    """A stream from the replica broke because it died."""

    replica_id: str


Notice = RequestEnded | PrefillEnded | ReplicaLost


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """From one gateway. The notices come first."""

    caller: str
    notices: tuple[Notice, ...] = ()
    requests: tuple[RoutingRequest, ...] = ()


class Answer(NamedTuple):
    """To one request."""

    request_id: str
    decision: Decision | Rejection | None
    """Without its candidates: they are the router's to explain. None when the request was given up: it was released, or its
    gateway's lease had ended. It may be asked anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """To one gateway, in the order in which they were decided."""

    life: str
    """Of the router that answers; another one knows nothing of what was asked before."""
    answers: tuple[Answer, ...] = ()
    is_known: bool = True
    """The router owed this gateway an answer when it was asked for them."""
