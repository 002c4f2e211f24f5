"""What a request asks for, within what its tenant may."""

from __future__ import annotations

import pytest

from cluster.failures import BadRequest
from cluster.protocols.openai.conversion import Caller
from cluster.settings.priorities import PriorityRules

RULES = PriorityRules(highest=0, highest_by_tenant={"vip": -5, "batch": 10})


@pytest.mark.parametrize(
    ("tenant", "asked", "granted"),
    [
        ("vip", -5, -5),
        ("vip", -9, -5),
        ("vip", None, 0),
        ("batch", -1, 10),
        ("batch", None, 10),
        ("batch", 20, 20),
        ("anybody", -1, 0),
        ("anybody", 3, 3),
    ],
)
def test_priority_is_granted_up_to_the_tenants_highest(tenant: str, asked: int | None, granted: int) -> None:
    assert RULES.granted(tenant, asked) == granted


def test_without_rules_everybody_gets_what_they_ask_for() -> None:
    assert PriorityRules().granted("anybody", -7) == -7
    assert PriorityRules().granted("anybody", None) == 0


def test_field_of_the_body_goes_before_the_header() -> None:
    caller = Caller(tenant="vip", arrival_s=0.0, asked_priority=-3, priorities=RULES)
    assert caller.priority(None) == -3
    assert caller.priority(4) == 4


@pytest.mark.parametrize(("value", "priority"), [(None, None), ("3", 3), (" -12 ", -12), ("1000000", 1_000_000)])
def test_header_is_read(value: str | None, priority: int | None) -> None:
    assert RULES.asked_for(value) == priority


@pytest.mark.parametrize("value", ["", "-", "high", "1.5", "1000001", "--1", "9" * 5000, "\u0663"])
def test_header_that_is_no_priority_is_refused_by_name(value: str) -> None:
    with pytest.raises(BadRequest, match="X-Priority") as refused:
        RULES.asked_for(value)
    assert refused.value.param == "X-Priority"


def test_rules_refuse_a_limit_out_of_range() -> None:
    with pytest.raises(ValueError, match="highest_by_tenant must be from"):
        PriorityRules(highest_by_tenant={"a": 10**9})
