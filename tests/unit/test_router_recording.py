from __future__ import annotations

import io

import pytest

from replicas.engine_config import Role
from replicas.request import TraceContext
from replicas.stats import ReplicaReport, ReplicaStats, TierLoad
from router.config import PolicyName, RouterConfig
from router.policies.policy import RoundRobin
from router.policies.policy_choice import make_policy
from router.policies.recording import DecisionRecorder, read_records, replay
from router.router import Router
from router.snapshot import Decision, RoutingRequest

POLICIES: tuple[PolicyName, ...] = ("scoring", "least_loaded", "round_robin", "power_of_two", "longest_prefix", "consistent_hash")


def record(policy: PolicyName, roles: tuple[Role, ...] = ("unified",)) -> tuple[str, list[Decision]]:
    """Five replicas, with `roles` in turn."""
    config = RouterConfig(policy=policy, dispatch_ahead=None)
    stream = io.StringIO()
    router = Router(config, make_policy(config), DecisionRecorder(stream))
    for number in range(5):
        tiers = (TierLoad(0, num_running=1), TierLoad(9, num_running=number - 1, num_context_tokens=160)) if number > 1 else ()
        stats = ReplicaStats(num_running=number, tiers=tiers, num_blocks=100, num_free_blocks=50, prefill_tokens_per_s=1_000.0 / 3)
        router.apply_report(
            ReplicaReport(
                replica_id=f"r{number}",
                model="m",
                epoch=1,
                stats=stats,
                block_size=16,
                max_num_seqs=9,
                first_event=0,
                role=roles[number % len(roles)],
            ),
            0.1,
        )
    requests: list[RoutingRequest] = []
    decisions = []
    for number in range(20):
        request = RoutingRequest(
            request_id=f"q{number}",
            model="m",
            num_prompt_tokens=100 + number,
            max_tokens=7,
            block_keys=tuple(bytes([number % 3, position]) for position in range(6)),
            deadline_s=5.0 if number % 2 else None,
            excluded_replicas=frozenset({"r1", "r3"}) if number % 4 == 0 else frozenset(),
            trace_context=TraceContext(traceparent=f"00-{number:032x}-1-01", tracestate="a=1") if number % 2 else TraceContext(),
        )
        requests.append(request)
        router.submit(request, number / 7)
        decisions += [answer for answer in router.step(number / 7) if isinstance(answer, Decision)]
    assert [each.request for each in read_records(stream.getvalue().splitlines())] == requests
    return stream.getvalue(), decisions


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("roles", [("unified",), ("prefill", "decode")])
def test_replay_same_policy_makes_the_recorded_decisions(policy: PolicyName, roles: tuple[Role, ...]) -> None:
    text, decisions = record(policy, roles)
    assert any(decision.prefill_replica_id for decision in decisions) == (len(roles) > 1)
    replayed = list(replay(read_records(text.splitlines()), make_policy(RouterConfig(policy=policy))))
    assert len(replayed) == 20
    assert [again for _, again in replayed] == [entry.decision for entry, _ in replayed] == decisions


def test_replay_other_policy_shows_what_would_change() -> None:
    text, _ = record("least_loaded")
    changed = [entry for entry, again in replay(read_records(text.splitlines()), RoundRobin()) if again != entry.decision]
    assert changed


def test_read_records_round_trips_requests_exactly() -> None:
    text, _ = record("scoring")
    first = next(read_records(text.splitlines()))
    assert first.request.excluded_replicas == frozenset({"r1", "r3"})
    assert first.request.block_keys == tuple(bytes([0, position]) for position in range(6))
    assert first.request.trace_context == TraceContext()


def test_read_records_of_the_version_before_costs_had_a_unit() -> None:
    text, decisions = record("scoring")
    older = text.replace('"cost_s"', '"cost"')
    assert older != text
    assert [each.decision for each in read_records(older.splitlines())] == decisions


def test_read_records_damaged_line_is_named() -> None:
    text, _ = record("scoring")
    lines = text.splitlines()
    lines[2] = lines[2][:50]
    with pytest.raises(ValueError, match="line 3 is no decision record"):
        list(read_records(lines))
