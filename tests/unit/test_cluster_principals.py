"""Who asks, by the head of a request, and how urgent that may be."""

from __future__ import annotations

import pytest

from cluster.generation.request_context import RequestContext
from cluster.principal import Principal
from cluster.settings.gateway_config import GatewayConfig
from cluster.settings.limits import RequestLimits
from cluster.settings.priorities import PriorityRules
from cluster.web.principals import Principals

LIMITS = RequestLimits(max_n=3)
CONFIG = GatewayConfig(
    tenant_header="X-Team", limits=LIMITS, priorities=PriorityRules(highest=0, highest_by_tenant={"vip": -5, "batch": 10})
)


@pytest.mark.parametrize(
    ("headers", "principal"),
    [
        ({}, Principal(tenant="default", highest_priority=0, limits=LIMITS)),
        ({b"x-team": b""}, Principal(tenant="default", highest_priority=0, limits=LIMITS)),
        ({b"x-tenant": b"vip"}, Principal(tenant="default", highest_priority=0, limits=LIMITS)),
        ({b"x-team": b"vip"}, Principal(tenant="vip", highest_priority=-5, limits=LIMITS)),
        ({b"x-team": b"t" * 200}, Principal(tenant="t" * 128, highest_priority=0, limits=LIMITS)),
        ({b"x-team": b"\xe9"}, Principal(tenant="\u00e9", highest_priority=0, limits=LIMITS)),
    ],
)
def test_principal_is_the_tenant_of_the_configured_header_with_its_rights(headers: dict[bytes, bytes], principal: Principal) -> None:
    assert Principals(CONFIG).of(headers) == principal


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
    assert Principals(CONFIG).of({b"x-team": tenant.encode()}).granted_priority(asked) == granted


@pytest.mark.parametrize(("rules", "granted"), [(PriorityRules(), [0, 0, 7, 0]), (PriorityRules(highest=None), [-7, 0, 7, 0])])
def test_nobody_is_more_urgent_than_the_rest_unless_the_limit_is_lifted(rules: PriorityRules, granted: list[int]) -> None:
    principal = Principals(GatewayConfig(priorities=rules)).of({})
    assert [principal.granted_priority(asked) for asked in (-7, 0, 7, None)] == granted


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (PriorityRules(highest_by_tenant={"gold": 10, "silver": -5, "bronze": 0}), ["gold"]),
        (PriorityRules(highest=20, highest_by_tenant={"gold": 10}), []),
        (PriorityRules(highest=None, highest_by_tenant={"gold": 10}), ["gold"]),
        (PriorityRules(), []),
    ],
)
def test_tenant_slowed_down_by_a_large_number_is_named_with_the_number_that_speeds_it_up(rules: PriorityRules, named: list[str]) -> None:
    assert len(rules.cautions) == len(named)
    for caution, tenant in zip(rules.cautions, named, strict=True):
        assert f"{tenant}: 10 makes {tenant} less urgent" in caution
        assert f"{tenant}: -10" in caution


def test_field_of_the_body_goes_before_the_header() -> None:
    context = RequestContext(principal=Principal(highest_priority=-5), arrival_s=0.0, asked_priority=-3)
    assert (context.priority(None), context.priority(4)) == (-3, 4)


def test_rules_refuse_a_limit_out_of_range() -> None:
    with pytest.raises(ValueError, match="highest_by_tenant must be from"):
        PriorityRules(highest_by_tenant={"a": 10**9})
