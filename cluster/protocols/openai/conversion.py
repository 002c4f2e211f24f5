"""From the parameters that OpenAI's endpoints share to a prepared generation: the one place where wire names become ours."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TypeVar

from cluster.failures import BadRequest
from cluster.generation.prepared_generation import prepare_generation
from cluster.generation.request_context import RequestContext
from cluster.models.served_model import ServedModel
from cluster.protocols.openai.answer_form import AnswerForm
from cluster.protocols.openai.generation_fields import GenerationFields
from cluster.protocols.wire import shown
from replicas.grammar.checking.checks import CheckedGrammar
from replicas.grammar_spec import GrammarSpec
from replicas.sampling_params import SamplingParams

T = TypeVar("T")


def prepare(
    body: GenerationFields,
    model: ServedModel,
    context: RequestContext,
    *,
    response_id: str,
    prompts: list[tuple[int, ...]],
    prompt_param: str,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: CheckedGrammar | None = None,
    echoes: tuple[str, ...] = (),
    echoed_logprobs: int | None = None,
    predicted_ids: tuple[int, ...] = (),
) -> AnswerForm:
    """Checks tokenized prompts against the model. `prompt_param` is their name on the wire. Raises BadRequest."""
    room = min(_room(prompt, prompt_param, max_tokens, model) for prompt in prompts)
    check_vocabulary("stop_token_ids", body.stop_token_ids or (), model)
    check_vocabulary("logit_bias", body.logit_bias or (), model)
    prompt_logprobs = max((asked for asked in (echoed_logprobs, body.prompt_logprobs) if asked is not None), default=None)
    is_prompt_only = max_tokens == 0 and prompt_logprobs is None
    # Room is positive wherever tokens are asked for; what runs nothing keeps a valid placeholder of one.
    num_tokens = 1 if is_prompt_only else room if max_tokens is None else max_tokens
    generation = prepare_generation(
        context,
        model,
        response_id=response_id,
        prompts=prompts,
        params=sampling_params(
            body,
            max_tokens=num_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=None if grammar is None else grammar.spec,
        ),
        dropped_keywords=() if grammar is None else grammar.dropped,
        asked_priority=body.priority,
        cache_salt=body.cache_salt or "",
        stream=bool(body.stream),
        is_prompt_only=is_prompt_only,
        speculates=body.speculation != "off",
        predicted_ids=predicted_ids,
    )
    return AnswerForm(
        generation=generation,
        model=model,
        created_s=int(time.time()),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        echoes=echoes,
        echoes_logprobs=echoed_logprobs is not None,
        num_prompt_logprobs=body.prompt_logprobs,
        metadata=body.metadata,
    )


def sampling_params(
    body: GenerationFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: GrammarSpec | None = None,
) -> SamplingParams:
    """Wire values with OpenAI's defaults. Raises BadRequest for combinations that SamplingParams refuses."""
    top_k, top_p = _or(body.top_k, 0), _or(body.top_p, 1.0)
    if top_p == 0:  # allowed on the wire: the smallest nucleus is the most probable token
        top_k, top_p = 1, 1.0
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_or(body.min_tokens, 0),
            temperature=_or(body.temperature, 1.0),
            top_p=top_p,
            top_k=max(0, top_k),
            min_p=_or(body.min_p, 0.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            logit_bias=body.logit_bias or {},
            stop=body.stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=_or(body.n, 1),
            seed=body.seed,
            skip_special_tokens=body.skip_special_tokens is not False,
            grammar=grammar,
        )
    except ValueError as error:
        name, problem = str(error).split(" ", 1)
        raise BadRequest(f"Invalid value for '{name}': {problem}.", param=name, code="invalid_value") from error


def _room(prompt: tuple[int, ...], param: str, max_tokens: int | None, model: ServedModel) -> int:
    """Tokens that may follow the prompt. Raises BadRequest when the prompt, or the prompt with `max_tokens`, does not fit."""
    limit = model.description.max_model_len
    if not prompt:
        raise BadRequest(f"Invalid value for '{param}': must have at least one token.", param=param, code="empty_prompt")
    wanted = 1 if max_tokens is None else max_tokens
    if len(prompt) + wanted > limit:
        raise BadRequest(
            f"This model's maximum context length is {limit} tokens. However, you requested {len(prompt) + wanted} tokens "
            f"({len(prompt)} in the {param}, {wanted} in the completion). Please reduce the length of the {param} or completion.",
            param=param,
            code="context_length_exceeded",
        )
    return limit - len(prompt)


def far_over_context(param: str, model: ServedModel) -> BadRequest:
    limit = model.description.max_model_len
    return BadRequest(
        f"This model's maximum context length is {limit} tokens. However, the {param} alone has more than that. "
        f"Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def check_vocabulary(param: str, token_ids: Iterable[int], model: ServedModel) -> None:
    size = model.description.vocab_size
    for token_id in token_ids:
        if token_id >= size:
            raise BadRequest(
                f"Invalid value for '{param}': token ids of this model are from 0 to {size - 1}, got {shown(token_id)}.",
                param=param,
                code="invalid_value",
            )


def too_many(param: str, count: int, limit: int) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': this server allows at most {limit}, got {count}.", param=param, code="invalid_value")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
