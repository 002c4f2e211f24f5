"""Writes decisions with all their inputs as JSON lines, reads them, and replays them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from replicas.request import TraceContext
from router.policies.policy import Policy
from router.snapshot import (
    CandidateLoad,
    CandidateScore,
    ClusterSnapshot,
    Decision,
    LoadBehind,
    ReplicaLoad,
    ReplicaSnapshot,
    RoutingRequest,
)

DecisionSink = Callable[[RoutingRequest, ClusterSnapshot, int, Decision], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """One call of `Policy.choose` and its result."""

    request: RoutingRequest
    snapshot: ClusterSnapshot
    seed: int
    decision: Decision


class DecisionRecorder:
    """A `DecisionSink` that writes one JSON object a line. The caller owns the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, request: RoutingRequest, snapshot: ClusterSnapshot, seed: int, decision: Decision) -> None:
        record = {
            "request": asdict(request),
            "snapshot": {
                "now_s": snapshot.now_s,
                "replicas": [_replica_fields(replica) for replica in snapshot.replicas],
                "prefill": [_replica_fields(replica) for replica in snapshot.prefill],
            },
            "seed": seed,
            "decision": asdict(decision) | {"candidates": [_candidate_fields(candidate) for candidate in decision.candidates]},
        }
        self._stream.write(json.dumps(record, default=_to_json, separators=(",", ":")) + "\n")


def read_records(lines: Iterable[str]) -> Iterator[DecisionRecord]:
    """Records in order. Raises ValueError with the number of an invalid line."""
    for number, line in enumerate(lines, 1):
        try:
            yield _record(json.loads(line))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is no decision record: {error}") from error


def replay(records: Iterable[DecisionRecord], policy: Policy) -> Iterator[tuple[DecisionRecord, Decision]]:
    """Each record with the decision of `policy` for the same inputs; an unchanged policy gives the recorded one."""
    for record in records:
        yield record, policy.choose(record.request, record.snapshot, record.seed)


def _to_json(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


def _replica_fields(replica: ReplicaSnapshot) -> dict[str, Any]:
    return replica._asdict() | {"stats": replica.stats._asdict()}


def _candidate_fields(candidate: CandidateScore | CandidateLoad) -> dict[str, Any]:
    if isinstance(candidate, CandidateLoad):
        return candidate._asdict()
    return {
        "replica_id": candidate.replica_id,
        "cost_s": candidate.cost_s,
        "terms": candidate.terms,
        "prefill_replica_id": candidate.prefill_replica_id,
    }


def _replicas(fields: Iterable[dict[str, Any]]) -> tuple[ReplicaSnapshot, ...]:
    return tuple(
        ReplicaSnapshot(**replica | {"stats": _load(replica["stats"]), "behind": _behind(replica.get("behind"))}) for replica in fields
    )


def _load(stats: dict[str, Any]) -> ReplicaLoad:
    """Records of older versions hold all of a replica's statistics, or lack the newest."""
    return ReplicaLoad(**{name: stats[name] for name in ReplicaLoad._fields if name in stats})


def _behind(counts: list[int] | None) -> LoadBehind | None:
    return None if counts is None else LoadBehind(*counts)


def _candidate(fields: dict[str, Any]) -> CandidateScore | CandidateLoad:
    if "cost" in fields:  # written before costs carried their unit
        fields["cost_s"] = fields.pop("cost")
    if "cost_s" not in fields:
        return CandidateLoad(**fields)
    terms = dict(fields.pop("terms"))
    return CandidateScore(**fields, names=tuple(terms), seconds=tuple(terms.values()))


def _record(fields: dict[str, Any]) -> DecisionRecord:
    request = fields["request"]
    request["block_keys"] = tuple(map(bytes.fromhex, request["block_keys"]))
    request["excluded_replicas"] = frozenset(request["excluded_replicas"])
    request["trace_context"] = TraceContext(*request.get("trace_context", ()))
    snapshot = fields["snapshot"]
    decision = fields["decision"]
    decision["candidates"] = tuple(map(_candidate, decision["candidates"]))
    return DecisionRecord(
        request=RoutingRequest(**request),
        snapshot=ClusterSnapshot(
            now_s=snapshot["now_s"], replicas=_replicas(snapshot["replicas"]), prefill=_replicas(snapshot.get("prefill", ()))
        ),
        seed=fields["seed"],
        decision=Decision(**decision),
    )
