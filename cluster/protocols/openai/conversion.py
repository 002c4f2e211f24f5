"""From OpenAI bodies to generation requests: the one place where wire names become ours."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from cluster.failures import BadRequest
from cluster.generation.prepared_generation import PreparedGeneration
from cluster.generation.request_context import RequestContext
from cluster.generation.served_model import ServedModel
from cluster.protocols.openai import chat_request, completion_request
from cluster.protocols.openai.chat_request import ChatCompletionRequest
from cluster.protocols.openai.completion_request import CompletionRequest
from cluster.protocols.openai.generation_fields import GenerationFields
from cluster.protocols.openai.wire import parse_body, refuse_unsupported, shown
from cluster.settings.limits import RequestLimits
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import TextTooLong

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16  # the description's default of max_tokens for text completions


def parse_chat_request(fields: Mapping[str, Any], limits: RequestLimits) -> ChatCompletionRequest:
    """Raises BadRequest naming the first parameter that is wrong or not supported."""
    body = parse_body(ChatCompletionRequest, refuse_unsupported(fields, chat_request.UNSUPPORTED))
    body.check_limits(limits)
    if len(body.messages) > limits.max_messages:
        raise _too_many("messages", len(body.messages), limits.max_messages)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", param="top_logprobs", code="invalid_value"
        )
    if body.max_tokens == 0:
        raise BadRequest("Invalid value for 'max_tokens': must be at least 1, got 0.", param="max_tokens", code="invalid_value")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadRequest(
            "'max_tokens' and 'max_completion_tokens' mean the same: set only one.", param="max_completion_tokens", code="invalid_value"
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.", param="continue_final_message", code="invalid_value"
        )
    return body


def parse_completion_request(fields: Mapping[str, Any], limits: RequestLimits) -> CompletionRequest:
    """Raises BadRequest naming the first parameter that is wrong or not supported."""
    kept = refuse_unsupported(fields, completion_request.UNSUPPORTED)
    body = parse_body(CompletionRequest, kept)
    body.check_limits(limits)
    if fields.get("best_of") is not None and body.n not in (None, 1):
        raise BadRequest("Invalid value for 'best_of': must be at least 'n'; leave it out.", param="best_of", code="invalid_value")
    if len(body.prompt) > limits.max_prompts:
        raise _too_many("prompt", len(body.prompt), limits.max_prompts)
    if body.max_tokens == 0 and body.min_tokens:
        message = f"Invalid value for 'min_tokens': must be at most max_tokens (0), got {body.min_tokens}."
        raise BadRequest(message, param="min_tokens", code="invalid_value")
    return body


async def prepare_chat(body: ChatCompletionRequest, model: ServedModel, context: RequestContext) -> PreparedGeneration:
    """Renders, tokenizes and checks against the model. Raises BadRequest, ChatTemplateError."""
    continues = bool(body.continue_final_message)
    try:
        prompt_ids = await model.chat_prompt_ids(
            [message.for_template() for message in body.messages],
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            template_kwargs=body.chat_template_kwargs,
            limit=model.description.max_model_len,
        )
    except TextTooLong as error:
        raise _far_over_context("messages", model) from error
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _prepare(
        body,
        model,
        context,
        response_id=f"chatcmpl-{secrets.token_hex(12)}",
        prompts=[tuple(prompt_ids)],
        prompt_param="messages",
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


async def prepare_completion(body: CompletionRequest, model: ServedModel, context: RequestContext) -> PreparedGeneration:
    """Tokenizes and checks against the model. Raises BadRequest."""
    prompts: list[tuple[int, ...]] = []
    echoes: list[str] = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            limit = model.description.max_model_len
            try:
                prompts.append(tuple(await model.encode(prompt, add_special_tokens=body.add_special_tokens is not False, limit=limit)))
            except TextTooLong as error:
                raise _far_over_context("prompt", model) from error
            echoes.append(prompt)
        else:
            _check_vocabulary("prompt", prompt, model)
            prompts.append(prompt)
            echoes.append(await model.decode(prompt) if body.echo else "")
    return _prepare(
        body,
        model,
        context,
        response_id=f"cmpl-{secrets.token_hex(12)}",
        prompts=prompts,
        prompt_param="prompt",
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        echoes=tuple(echoes) if body.echo else (),
        echoed_logprobs=body.logprobs if body.echo else None,
    )


def sampling_params(body: GenerationFields, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
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
        )
    except ValueError as error:
        name, problem = str(error).split(" ", 1)
        raise BadRequest(f"Invalid value for '{name}': {problem}.", param=name, code="invalid_value") from error


def _prepare(
    body: GenerationFields,
    model: ServedModel,
    context: RequestContext,
    *,
    response_id: str,
    prompts: list[tuple[int, ...]],
    prompt_param: str,
    max_tokens: int | None,
    logprobs: int | None,
    echoes: tuple[str, ...] = (),
    echoed_logprobs: int | None = None,
) -> PreparedGeneration:
    room = min(_room(prompt, prompt_param, max_tokens, model) for prompt in prompts)
    _check_vocabulary("stop_token_ids", body.stop_token_ids or (), model)
    _check_vocabulary("logit_bias", body.logit_bias or (), model)
    prompt_logprobs = max((asked for asked in (echoed_logprobs, body.prompt_logprobs) if asked is not None), default=None)
    is_prompt_only = max_tokens == 0 and prompt_logprobs is None
    # Room is positive wherever tokens are asked for; what runs nothing keeps a valid placeholder of one.
    num_tokens = 1 if is_prompt_only else room if max_tokens is None else max_tokens
    params = sampling_params(body, max_tokens=num_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return PreparedGeneration(
        response_id=response_id,
        model=model.name,
        requests=tuple(
            GenerationRequest(
                request_id=f"{response_id}-{index}",
                prompt_ids=prompt,
                params=params,
                seed=seed,
                priority=context.priority(body.priority),
                tenant=context.principal.tenant,
                cache_salt=body.cache_salt or "",
                arrival_s=context.arrival_s,
            )
            for index, prompt in enumerate(prompts)
        ),
        params=params,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        echoes=echoes,
        echoes_logprobs=echoed_logprobs is not None,
        num_prompt_logprobs=body.prompt_logprobs,
        is_prompt_only=is_prompt_only,
        created_s=int(time.time()),
    )


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


def _far_over_context(param: str, model: ServedModel) -> BadRequest:
    limit = model.description.max_model_len
    return BadRequest(
        f"This model's maximum context length is {limit} tokens. However, the {param} alone has more than that. "
        f"Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def _check_vocabulary(param: str, token_ids: Iterable[int], model: ServedModel) -> None:
    size = model.description.vocab_size
    for token_id in token_ids:
        if token_id >= size:
            raise BadRequest(
                f"Invalid value for '{param}': token ids of this model are from 0 to {size - 1}, got {shown(token_id)}.",
                param=param,
                code="invalid_value",
            )


def _too_many(param: str, count: int, limit: int) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': this server allows at most {limit}, got {count}.", param=param, code="invalid_value")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
