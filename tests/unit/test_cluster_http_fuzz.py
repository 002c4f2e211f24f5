"""Generated bodies: whatever is sent, the answer is an answer or a 4xx with a valid error body, and no block stays held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicas.text.tokenizer import Tokenizer
from tests.unit.in_process_cluster import MODEL, InProcessCluster, running_cluster
from tests.unit.openai_schemas import check_completion, check_schema

NUM_BODIES = 2_000

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
texts = st.text(max_size=40)
counts = st.integers(-2, 40) | st.integers() | json_values


def field(valid: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly values of the right kind, so that bodies get past the first check, and sometimes anything."""
    return st.one_of(valid, valid, valid, json_values)


shared_fields = {
    "frequency_penalty": field(st.floats(-2, 2)),
    "presence_penalty": field(st.floats(-3, 3)),
    "repetition_penalty": field(st.floats(0, 2)),
    "temperature": field(st.floats(0, 2.5)),
    "top_p": field(st.floats(0, 1)),
    "top_k": field(st.integers(-1, 100)),
    "min_p": field(st.floats(0, 1)),
    "n": field(st.integers(0, 4)),
    "max_tokens": field(st.integers(0, 20)),
    "min_tokens": field(st.integers(0, 8)),
    "seed": field(st.integers()),
    "stop": field(texts | st.lists(texts, max_size=5)),
    "stop_token_ids": field(st.lists(st.integers(-1, 60_000), max_size=4)),
    "logit_bias": field(st.dictionaries(st.integers(0, 60_000).map(str), st.floats(-100, 100), max_size=4)),
    "stream": field(st.booleans()),
    "stream_options": field(st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "x": json_values})),
    "ignore_eos": field(st.booleans()),
    "include_stop_str_in_output": field(st.booleans()),
    "skip_special_tokens": field(st.booleans()),
    "user": field(texts),
    "metadata": field(st.dictionaries(texts, texts, max_size=3)),
    "cache_salt": field(texts),
    "priority": field(st.integers(-5, 5)),
    "prompt_logprobs": field(st.integers(0, 21)),
}
messages = st.lists(
    field(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "developer", "tool", "x"]), "content": texts},
            optional={"name": texts, "refusal": st.none(), "tool_calls": json_values},
        )
    ),
    max_size=4,
)
chat_bodies = st.fixed_dictionaries(
    {"model": st.sampled_from([MODEL] * 9 + ["other"]), "messages": field(messages)},
    optional={
        **shared_fields,
        "logprobs": field(st.booleans()),
        "top_logprobs": field(st.integers(0, 21)),
        "max_completion_tokens": field(st.integers(1, 20)),
        "tools": json_values,
        "response_format": json_values,
        "chat_template_kwargs": field(st.dictionaries(texts, json_values, max_size=3)),
        "continue_final_message": field(st.booleans()),
        "add_generation_prompt": field(st.booleans()),
        "unknown": json_values,
    },
)
prompts = texts | st.lists(texts, max_size=4) | st.lists(st.integers(0, 49_151), max_size=8)
completion_bodies = st.fixed_dictionaries(
    {"model": st.just(MODEL), "prompt": field(prompts | st.lists(st.lists(st.integers(0, 60_000), max_size=4), max_size=3))},
    optional={
        **shared_fields,
        "echo": field(st.booleans()),
        "logprobs": field(st.integers(0, 6)),
        "best_of": counts,
        "suffix": json_values,
    },
)
tokenize_bodies = st.fixed_dictionaries(
    {"model": st.just(MODEL)},
    optional={"prompt": field(texts), "messages": field(messages), "tokens": field(st.lists(counts, max_size=5))},
)
calls = st.one_of(
    st.tuples(st.just("/v1/chat/completions"), chat_bodies),
    st.tuples(st.just("/v1/completions"), completion_bodies),
    st.tuples(st.sampled_from(["/tokenize", "/detokenize"]), tokenize_bodies),
    st.tuples(st.sampled_from(["/v1/chat/completions", "/v1/completions"]), st.binary(max_size=60)),
)


class _Server:
    """A cluster that lives through all examples, which hypothesis runs from outside any event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self.cluster: InProcessCluster = self.run(self._stack.enter_async_context(running_cluster(tokenizer)))
        transport = httpx.ASGITransport(self.cluster.app, raise_app_exceptions=True)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10)

    def run(self, work: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, 20))

    def close(self) -> None:
        self.run(self.client.aclose())
        self.run(self._stack.aclose())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@pytest.fixture(scope="module")
def server(default_tokenizer: Tokenizer) -> Iterator[_Server]:
    made = _Server(default_tokenizer)
    yield made
    made.close()


def check_stream(text: str) -> None:
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]" or "error" in json.loads(events[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=NUM_BODIES, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(call=calls)
def test_any_body_gets_an_answer_or_a_named_error(server: _Server, call: tuple[str, Any]) -> None:
    path, body = call
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = server.run(server.client.post(path, content=content, headers={"Content-Type": "application/json"}))
    assert response.status_code == 200 or 400 <= response.status_code < 500, (response.status_code, response.text, body)
    if response.status_code != 200:
        check_schema("ErrorResponse", response.json())
    elif response.headers["content-type"].startswith("text/event-stream"):
        check_stream(response.text)
    elif path == "/v1/chat/completions":
        check_schema("CreateChatCompletionResponse", response.json())
    elif path == "/v1/completions":
        check_completion(response.json())


@pytest.mark.slow
def test_after_the_fuzz_no_block_is_held(server: _Server) -> None:
    server.run(server.cluster.wait_idle())
