from __future__ import annotations

import json

from router.explanation import explanation
from router.snapshot import CandidateLoad, CandidateScore, Decision, Rejection


def test_costs_are_seconds_the_cheapest_first_and_add_up() -> None:
    dear = CandidateScore("b", 1.75, ("wait", "prefill"), (1.5, 0.25))
    pair = CandidateScore("d", 0.5, ("prefill", "handoff"), (0.45, 0.05), "p")
    shown = explanation(Decision(request_id="q", replica_id="d", replica_role="decode", prefill_replica_id="p", candidates=(dear, pair)))
    assert shown["candidates"] == [
        {"replica": "d", "prefill_replica": "p", "cost_s": 0.5, "terms": {"prefill": 0.45, "handoff": 0.05}},
        {"replica": "b", "prefill_replica": None, "cost_s": 1.75, "terms": {"wait": 1.5, "prefill": 0.25}},
    ]


def test_loads_are_counts_without_a_cost() -> None:
    loads = (CandidateLoad("b", 4, 900), CandidateLoad("a", 2, 70))
    shown = explanation(Decision(request_id="q", replica_id="a", candidates=loads))
    assert shown["candidates"] == [
        {"replica": "a", "num_requests": 2, "num_tokens": 70},
        {"replica": "b", "num_requests": 4, "num_tokens": 900},
    ]


def test_nothing_is_shown_as_minus_zero() -> None:
    score = CandidateScore("a", -0.00001, ("pending", "wait"), (-0.0, -0.00004))
    shown = explanation(Decision(request_id="q", replica_id="a", predicted_ttft_s=-0.0, candidates=(score,)))
    assert "-0.0" not in json.dumps(shown)


def test_rejection_says_why_and_when_to_come_back() -> None:
    shown = explanation(Rejection(request_id="q", reason="the queue is full", retry_after_s=2.04, kind="queue_full"))
    assert shown == {"request_id": "q", "rejected": "the queue is full", "retry_after_s": 2.0, "kind": "queue_full"}
