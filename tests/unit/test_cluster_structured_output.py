"""Structured output over HTTP, with checks that need no compiler: what reaches the engine, and what clients are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.models.grammar_gate import GrammarGate
from cluster.settings.structured_output import StructuredOutputConfig
from replicas.grammar_spec import GrammarKind, GrammarSpec
from replicas.request import GenerationRequest
from replicas.text.tokenizer import Tokenizer
from tests.unit.fake_engine import EchoEngine
from tests.unit.fake_grammar_checks import DROPPED, FakeGrammarChecks
from tests.unit.in_process_cluster import MODEL, InProcessCluster, client_of, running_cluster

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SENT_DROPPED = "#/properties/gr%C3%B6%C3%9Fe/uniqueItems; #/not"


class Served:
    """A cluster with its client, the checks that it asks and the requests that its engine gets."""

    def __init__(self, cluster: InProcessCluster, client: httpx.AsyncClient, checks: FakeGrammarChecks) -> None:
        self.cluster, self.client, self.checks = cluster, client, checks
        self.requests: list[GenerationRequest] = []
        engine: EchoEngine = cluster.replicas[0].engine
        add = engine.add_request

        def record(request: GenerationRequest) -> None:
            self.requests.append(request)
            add(request)

        engine.add_request = record  # type: ignore[method-assign]

    async def post(self, text: str | None = "{}", *, path: str = CHAT, **fields: Any) -> httpx.Response:
        """A request whose schema has `text` as its description."""
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 4, **fields}
        body |= {"messages": [{"role": "user", "content": "say something"}]} if path == CHAT else {"prompt": "say something"}
        if text is not None:
            schema = {"name": "n", "schema": {"description": text}, "strict": body.pop("strict", None)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return await self.client.post(path, json=body)


async def _served(tokenizer: Tokenizer, config: StructuredOutputConfig) -> AsyncIterator[Served]:
    checks = FakeGrammarChecks()
    async with running_cluster(tokenizer, grammars=GrammarGate(config, checks)) as cluster, client_of(cluster) as client:
        yield Served(cluster, client, checks)
        await cluster.wait_idle()


@pytest.fixture
async def served(default_tokenizer: Tokenizer) -> AsyncIterator[Served]:
    async for one in _served(default_tokenizer, StructuredOutputConfig()):
        yield one


@pytest.fixture
async def warning(default_tokenizer: Tokenizer) -> AsyncIterator[Served]:
    """Configured to warn, for a model that thinks first."""
    async for one in _served(default_tokenizer, StructuredOutputConfig(unsupported="warn", begins_after="</think>")):
        yield one


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_grammar_reaches_the_engine_with_every_choice_and_the_log(served: Served, path: str) -> None:
    response = await served.post("fine", path=path, n=2)
    assert response.status_code == 200, response.text
    assert "x-unsupported-keywords" not in response.headers
    spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text='{"description":"fine"}')
    assert [request.params.grammar for request in served.requests] == [spec, spec]
    assert served.checks.asked == [(spec, "default", False)]
    assert [(record.grammar, record.dropped_keywords) for record in served.cluster.records] == [("json_schema", ())]


async def test_request_without_a_grammar_is_not_checked(served: Served) -> None:
    assert (await served.post(None)).status_code == 200
    assert served.checks.asked == []
    assert served.requests[0].params.grammar is None
    assert served.cluster.records[0].grammar is None


async def test_refused_grammar_is_a_400_that_names_the_field_and_the_keyword(served: Served) -> None:
    response = await served.post("refused")
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "Invalid value for 'response_format.json_schema.schema': #/items/uniqueItems cannot be enforced.",
        "type": "invalid_request_error",
        "param": "response_format.json_schema.schema",
        "code": "invalid_grammar",
    }
    assert served.requests == []


async def test_busy_checks_are_a_503_with_a_time_to_come_back(served: Served) -> None:
    response = await served.post("busy")
    assert (response.status_code, response.headers["retry-after"]) == (503, "4")


@pytest.mark.parametrize("stream", [False, True])
async def test_dropped_keywords_are_named_in_a_header_and_in_the_log(served: Served, stream: bool) -> None:
    """The header percent-encodes what is not ASCII."""
    response = await served.post("reducible", stream=stream, structured_outputs={"unsupported": "warn"})
    assert response.status_code == 200
    assert response.headers["x-unsupported-keywords"] == SENT_DROPPED
    assert served.requests[0].params.grammar == GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text="{}")
    assert served.cluster.records[0].dropped_keywords == DROPPED


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 200),
        ({"structured_outputs": {"unsupported": "refuse"}}, 400),
        ({"strict": True}, 400),
        ({"strict": True, "structured_outputs": {"unsupported": "warn"}}, 400),
    ],
)
async def test_configured_warning_yields_to_the_request_and_always_to_strict(warning: Served, fields: dict[str, Any], status: int) -> None:
    assert (await warning.post("reducible", **fields)).status_code == status


@pytest.mark.parametrize(("asked", "begins_after"), [(None, "</think>"), ("", None), ("<answer>", "<answer>")])
async def test_grammar_begins_where_the_request_says_or_else_the_configuration(
    warning: Served, asked: str | None, begins_after: str | None
) -> None:
    await warning.post("fine", structured_outputs={"begins_after": asked})
    assert warning.requests[0].params.grammar is not None
    assert warning.requests[0].params.grammar.begins_after == begins_after


async def test_server_without_checks_refuses_grammars_by_name(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "guided_regex": "a"}
    response = await client.post(CHAT, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unsupported": "ignore"}, "unsupported must be refuse or warn, got 'ignore'"),
        ({"begins_after": ""}, "begins_after must have 1 to 64 characters"),
    ],
)
def test_bad_setting_is_named(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputConfig(**settings)  # type: ignore[arg-type]
