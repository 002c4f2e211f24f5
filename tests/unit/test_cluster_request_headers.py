"""What the headers of a generation ask for, and how a wrong one is refused."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from cluster.failures import BadRequest
from cluster.generation.request_context import RequestContext
from cluster.principal import Principal
from cluster.web.request_headers import context_of

PRINCIPAL = Principal(tenant="acme")


def context(**headers: str) -> RequestContext:
    """Of headers whose names are written with underscores."""
    given = Headers({name.replace("_", "-"): value for name, value in headers.items()})
    return context_of(given, PRINCIPAL, priority_header="X-Priority", arrival_s=12.5)


def test_request_without_headers_asks_for_nothing() -> None:
    assert context() == RequestContext(principal=PRINCIPAL, arrival_s=12.5)


@pytest.mark.parametrize(("value", "priority"), [("3", 3), (" -12 ", -12), ("1000000", 1_000_000)])
def test_priority_header_is_read(value: str, priority: int) -> None:
    assert context(x_priority=value).asked_priority == priority


def test_target_headers_are_milliseconds() -> None:
    asked = context(x_ttft_target_ms="1500", x_tpot_target_ms=" 40 ")
    assert (asked.asked_ttft_s, asked.asked_tpot_s) == (1.5, 0.04)


@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "soon", "86400001", "9" * 5000, "\u00b2"])
@pytest.mark.parametrize("name", ["X-TTFT-Target-Ms", "X-TPOT-Target-Ms"])
def test_header_that_is_no_target_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(BadRequest, match=name) as refused:
        context(**{name.replace("-", "_"): value})
    assert (refused.value.param, refused.value.code) == (name, "invalid_value")


@pytest.mark.parametrize("value", ["", "-", "high", "1.5", "1000001", "--1", "9" * 5000, "\u00b2"])
def test_header_that_is_no_priority_is_refused_by_name(value: str) -> None:
    with pytest.raises(BadRequest, match="X-Priority") as refused:
        context(x_priority=value)
    assert refused.value.param == "X-Priority"
