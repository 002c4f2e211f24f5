"""Headers of a trace: examples and rules of https://www.w3.org/TR/trace-context-1/."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from cluster.web.trace_headers import trace_context_of
from replicas.request import TraceContext
from replicas.text.tokenizer import Tokenizer
from tests.unit.in_process_cluster import CHAT, MODEL, TEXT, client_of, running_cluster

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STATE = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"


def read(*headers: tuple[str, str]) -> TraceContext:
    return trace_context_of(Headers(raw=[(name.encode(), value.encode("latin-1")) for name, value in headers]))


@pytest.mark.parametrize(
    ("parent", "state"),
    [
        (PARENT, ""),
        (PARENT, STATE),
        (PARENT, "fw529a3039@dt=FfA,a/b*c_d-e=x y"),
        (PARENT, "a=1, ,b=2"),
        ("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-the-future-will-be-like", STATE),
    ],
)
def test_headers_of_the_standard_are_taken_as_they_are(parent: str, state: str) -> None:
    assert read(("traceparent", parent), ("tracestate", state)) == TraceContext(parent, state)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        PARENT.upper(),
        f"{PARENT}-more",
        PARENT.replace("00-", "ff-", 1),
        PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        PARENT.replace("b7ad6b7169203331", "0" * 16),
        PARENT.replace("b7ad", "b7ag"),
        PARENT.replace("-01", "-1"),
        "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-" + "x" * 600,
        "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-\xe9",
    ],
)
def test_malformed_traceparent_is_as_none_and_takes_its_tracestate_along(parent: str) -> None:
    assert read(("traceparent", parent), ("tracestate", STATE)) == TraceContext()


@pytest.mark.parametrize(
    "state", ["no-equals-sign", "UPPER=1", "a=b=c", "a=\xe9", "a=" + "x" * 600, ",".join(f"k{i}=1" for i in range(33))]
)
def test_malformed_tracestate_is_dropped_alone(state: str) -> None:
    assert read(("traceparent", PARENT), ("tracestate", state)) == TraceContext(PARENT, "")


def test_tracestate_of_several_headers_is_one_list_and_two_parents_are_none() -> None:
    assert read(("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")) == TraceContext(PARENT, "a=1,b=2")
    assert read(("traceparent", PARENT), ("traceparent", PARENT)) == TraceContext()


@pytest.mark.parametrize(
    ("headers", "expected"), [({"Traceparent": PARENT, "tracestate": STATE}, TraceContext(PARENT, STATE)), ({}, TraceContext())]
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_trace_arrives_at_the_router_and_at_the_replica(
    default_tokenizer: Tokenizer, path: str, headers: dict[str, str], expected: TraceContext
) -> None:
    prompt = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    async with running_cluster(default_tokenizer) as cluster, client_of(cluster) as client:
        answer = await client.post(path, json={"model": MODEL, "max_tokens": 2, "n": 2, **prompt}, headers=headers)
    assert answer.status_code == 200
    assert [request.trace_context for request in cluster.backend.routed] == [expected]
    assert [request.trace_context for request in cluster.backend.sent] == [expected] * 2, "each choice belongs to the trace"
