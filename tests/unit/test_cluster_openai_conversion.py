"""From OpenAI bodies to sampling parameters: expected values are written out from OpenAI's description."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.failures import BadRequest
from cluster.generation.prepared_generation import PreparedGeneration
from cluster.generation.request_context import RequestContext
from cluster.models.served_model import ServedModel
from cluster.principal import Principal
from cluster.protocols.openai.chat import ChatDialect, ParsedChat
from cluster.protocols.openai.completions import CompletionDialect, ParsedCompletion
from cluster.settings.limits import RequestLimits
from replicas.model_description import ModelDescription
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer

LIMITS = RequestLimits()
CONTEXT = RequestContext(principal=Principal(tenant="acme"), arrival_s=12.5)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model(default_tokenizer: Tokenizer) -> ServedModel:
    description = ModelDescription(max_model_len=100, vocab_size=49_152, block_size=16, dtype="float32", tokenizer_source="x")
    return ServedModel("m", description, default_tokenizer, created_s=0)


def chat(**fields: Any) -> ParsedChat:
    return ChatDialect().parse(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), LIMITS)


def completion(**fields: Any) -> ParsedCompletion:
    return CompletionDialect().parse(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), LIMITS)


async def prepare(call: ParsedChat | ParsedCompletion, model: ServedModel) -> PreparedGeneration:
    return (await call.prepare(model, CONTEXT)).generation


async def test_chat_defaults_are_openais(model: ServedModel) -> None:
    prepared = await prepare(chat(), model)
    room = 100 - len(prepared.requests[0].prompt_ids)
    assert prepared.params == SamplingParams(max_tokens=room, temperature=1.0, top_p=1.0)
    assert prepared.requests[0].tenant == "acme"
    assert prepared.requests[0].arrival_s == 12.5


async def test_completion_defaults_are_openais(model: ServedModel) -> None:
    prepared = await prepare(completion(), model)
    assert prepared.params == SamplingParams(max_tokens=16)


async def test_every_sampling_field_arrives(model: ServedModel) -> None:
    body = chat(
        max_completion_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, logit_bias={"7": -100}, stop=["a", "b"], stop_token_ids=[3], include_stop_str_in_output=True,
        ignore_eos=True, logprobs=True, top_logprobs=4, n=3, seed=11, skip_special_tokens=False, priority=-2, cache_salt="s",
    )  # fmt: skip
    prepared = await prepare(body, model)
    assert prepared.params == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, logit_bias={7: -100.0}, stop=("a", "b"), stop_token_ids=(3,), include_stop_str_in_output=True,
        ignore_eos=True, logprobs=4, n=3, seed=11, skip_special_tokens=False,
    )  # fmt: skip
    assert prepared.requests[0].seed == 11
    assert prepared.requests[0].priority == -2
    assert prepared.requests[0].cache_salt == "s"


async def test_top_p_zero_means_the_most_probable_token(model: ServedModel) -> None:
    prepared = await prepare(completion(top_p=0), model)
    assert (prepared.params.top_k, prepared.params.top_p) == (1, 1.0)


async def test_top_k_minus_one_keeps_every_token(model: ServedModel) -> None:
    assert (await prepare(completion(top_k=-1), model)).params.top_k == 0


async def test_logprobs_without_alternatives_report_the_chosen_token(model: ServedModel) -> None:
    assert (await prepare(chat(logprobs=True), model)).params.logprobs == 0
    assert (await prepare(chat(logprobs=False), model)).params.logprobs is None
    assert (await prepare(completion(logprobs=0), model)).params.logprobs == 0


async def test_absent_seed_is_drawn_and_differs(model: ServedModel) -> None:
    first, second = await prepare(chat(), model), await prepare(chat(), model)
    assert first.requests[0].seed != second.requests[0].seed
    assert first.response_id != second.response_id


async def test_prompt_and_answer_must_fit_the_context(model: ServedModel) -> None:
    fits = await prepare(completion(prompt=[1] * 60, max_tokens=40), model)
    assert fits.params.max_tokens == 40
    with pytest.raises(BadRequest, match=r"maximum context length is 100 tokens\. However, you requested 101 tokens"):
        await prepare(completion(prompt=[1] * 60, max_tokens=41), model)
    with pytest.raises(BadRequest) as error:
        await prepare(chat(messages=[{"role": "user", "content": "word " * 200}]), model)
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")


async def test_messages_are_rendered_by_the_models_template(model: ServedModel, default_tokenizer: Tokenizer) -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
    )
    prepared = await prepare(body, model)
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
    assert list(prepared.requests[0].prompt_ids) == default_tokenizer.chat_prompt_ids(expected)


async def test_final_message_is_continued_without_a_new_turn(model: ServedModel, default_tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    prepared = await prepare(chat(messages=messages, continue_final_message=True), model)
    assert default_tokenizer.decode(prepared.requests[0].prompt_ids, skip_special_tokens=False).endswith("The answer is")


async def test_prompts_of_every_kind_become_token_ids(model: ServedModel, default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("hello")
    for prompt, expected in (
        ("hello", [ids]),
        (["hello", "hi"], [ids, default_tokenizer.encode("hi")]),
        (ids, [ids]),
        ([ids, [5]], [ids, [5]]),
    ):
        prepared = await prepare(completion(prompt=prompt), model)
        assert [list(request.prompt_ids) for request in prepared.requests] == expected
    assert len({request.request_id for request in prepared.requests}) == 2
