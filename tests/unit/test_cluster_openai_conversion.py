"""From OpenAI bodies to sampling parameters: expected values are written out from OpenAI's description."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.failures import BadRequest
from cluster.generation.request_context import RequestContext
from cluster.generation.served_model import ServedModel
from cluster.principal import Principal
from cluster.protocols.openai.conversion import parse_chat_request, parse_completion_request, prepare_chat, prepare_completion
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


def chat(**fields: Any) -> Any:
    return parse_chat_request({"model": "m", "messages": MESSAGES, **fields}, LIMITS)


def completion(**fields: Any) -> Any:
    return parse_completion_request({"model": "m", "prompt": "hi", **fields}, LIMITS)


async def test_chat_defaults_are_openais(model: ServedModel) -> None:
    prepared = await prepare_chat(chat(), model, CONTEXT)
    room = 100 - len(prepared.requests[0].prompt_ids)
    assert prepared.params == SamplingParams(max_tokens=room, temperature=1.0, top_p=1.0)
    assert prepared.requests[0].tenant == "acme"
    assert prepared.requests[0].arrival_s == 12.5


async def test_completion_defaults_are_openais(model: ServedModel) -> None:
    prepared = await prepare_completion(completion(), model, CONTEXT)
    assert prepared.params == SamplingParams(max_tokens=16)


async def test_every_sampling_field_arrives(model: ServedModel) -> None:
    body = chat(
        max_completion_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, logit_bias={"7": -100}, stop=["a", "b"], stop_token_ids=[3], include_stop_str_in_output=True,
        ignore_eos=True, logprobs=True, top_logprobs=4, n=3, seed=11, skip_special_tokens=False, priority=-2, cache_salt="s",
    )  # fmt: skip
    prepared = await prepare_chat(body, model, CONTEXT)
    assert prepared.params == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, logit_bias={7: -100.0}, stop=("a", "b"), stop_token_ids=(3,), include_stop_str_in_output=True,
        ignore_eos=True, logprobs=4, n=3, seed=11, skip_special_tokens=False,
    )  # fmt: skip
    assert prepared.requests[0].seed == 11
    assert prepared.requests[0].priority == -2
    assert prepared.requests[0].cache_salt == "s"


async def test_top_p_zero_means_the_most_probable_token(model: ServedModel) -> None:
    prepared = await prepare_completion(completion(top_p=0), model, CONTEXT)
    assert (prepared.params.top_k, prepared.params.top_p) == (1, 1.0)


async def test_top_k_minus_one_keeps_every_token(model: ServedModel) -> None:
    assert (await prepare_completion(completion(top_k=-1), model, CONTEXT)).params.top_k == 0


async def test_logprobs_without_alternatives_report_the_chosen_token(model: ServedModel) -> None:
    assert (await prepare_chat(chat(logprobs=True), model, CONTEXT)).params.logprobs == 0
    assert (await prepare_chat(chat(logprobs=False), model, CONTEXT)).params.logprobs is None
    assert (await prepare_completion(completion(logprobs=0), model, CONTEXT)).params.logprobs == 0


async def test_absent_seed_is_drawn_and_differs(model: ServedModel) -> None:
    first, second = await prepare_chat(chat(), model, CONTEXT), await prepare_chat(chat(), model, CONTEXT)
    assert first.requests[0].seed != second.requests[0].seed
    assert first.response_id != second.response_id


async def test_prompt_and_answer_must_fit_the_context(model: ServedModel) -> None:
    fits = await prepare_completion(completion(prompt=[1] * 60, max_tokens=40), model, CONTEXT)
    assert fits.params.max_tokens == 40
    with pytest.raises(BadRequest, match=r"maximum context length is 100 tokens\. However, you requested 101 tokens"):
        await prepare_completion(completion(prompt=[1] * 60, max_tokens=41), model, CONTEXT)
    with pytest.raises(BadRequest) as error:
        await prepare_chat(chat(messages=[{"role": "user", "content": "word " * 200}]), model, CONTEXT)
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")


async def test_messages_are_rendered_by_the_models_template(model: ServedModel, default_tokenizer: Tokenizer) -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
    )
    prepared = await prepare_chat(body, model, CONTEXT)
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
    assert list(prepared.requests[0].prompt_ids) == default_tokenizer.chat_prompt_ids(expected)


async def test_final_message_is_continued_without_a_new_turn(model: ServedModel, default_tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    prepared = await prepare_chat(chat(messages=messages, continue_final_message=True), model, CONTEXT)
    assert default_tokenizer.decode(prepared.requests[0].prompt_ids, skip_special_tokens=False).endswith("The answer is")


async def test_prompts_of_every_kind_become_token_ids(model: ServedModel, default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("hello")
    for prompt, expected in (
        ("hello", [ids]),
        (["hello", "hi"], [ids, default_tokenizer.encode("hi")]),
        (ids, [ids]),
        ([ids, [5]], [ids, [5]]),
    ):
        prepared = await prepare_completion(completion(prompt=prompt), model, CONTEXT)
        assert [list(request.prompt_ids) for request in prepared.requests] == expected
    assert len({request.request_id for request in prepared.requests}) == 2
