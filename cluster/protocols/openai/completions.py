"""POST /v1/completions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.failures import BadRequest
from cluster.generation.request_context import RequestContext
from cluster.models.served_model import ServedModel
from cluster.protocols.openai.calls import BodyCall, FormCall
from cluster.protocols.openai.completion_answers import CompletionAnswer, CompletionEvents
from cluster.protocols.openai.completion_request import UNSUPPORTED, CompletionRequest
from cluster.protocols.openai.conversion import check_vocabulary, far_over_context, prepare, too_many
from cluster.protocols.openai.errors import ErrorWriter
from cluster.protocols.openai.grammar_fields import asked_grammar
from cluster.protocols.wire import parse_body, parse_json_object, refuse_unsupported
from cluster.settings.limits import RequestLimits
from replicas.text.tokenizer import TextTooLong

DEFAULT_MAX_TOKENS = 16  # the description's default for text completions


class CompletionDialect(ErrorWriter):
    """A Dialect."""

    path = "/v1/completions"

    def parse(self, body: bytes, limits: RequestLimits) -> ParsedCompletion:
        fields = parse_json_object(body)
        parsed = _parse(fields, limits)
        return ParsedCompletion(body=parsed, prompt=fields.get("prompt"), asked_grammar=asked_grammar(parsed))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion(BodyCall[CompletionRequest]):
    """A ParsedCall."""

    async def prepare(self, model: ServedModel, context: RequestContext) -> FormCall:
        body = self.body
        prompts: list[tuple[int, ...]] = []
        echoes: list[str] = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                limit = model.description.max_model_len
                try:
                    prompts.append(tuple(await model.encode(prompt, add_special_tokens=body.add_special_tokens is not False, limit=limit)))
                except TextTooLong as error:
                    raise far_over_context("prompt", model) from error
                echoes.append(prompt)
            else:
                check_vocabulary("prompt", prompt, model)
                prompts.append(prompt)
                echoes.append(await model.decode(prompt) if body.echo else "")
        form = prepare(
            body,
            model,
            context,
            response_id=f"cmpl-{secrets.token_hex(12)}",
            prompts=prompts,
            prompt_param="prompt",
            grammar=await self.admitted_grammar(model, context),
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            echoes=tuple(echoes) if body.echo else (),
            echoed_logprobs=body.logprobs if body.echo else None,
        )
        return FormCall(form=form, events=CompletionEvents, whole=CompletionAnswer)


def _parse(fields: Mapping[str, Any], limits: RequestLimits) -> CompletionRequest:
    body = parse_body(CompletionRequest, refuse_unsupported(fields, UNSUPPORTED))
    body.check_limits(limits)
    if fields.get("best_of") is not None and body.n not in (None, 1):
        raise BadRequest("Invalid value for 'best_of': must be at least 'n'; leave it out.", param="best_of", code="invalid_value")
    if len(body.prompt) > limits.max_prompts:
        raise too_many("prompt", len(body.prompt), limits.max_prompts)
    if body.max_tokens == 0 and body.min_tokens:
        message = f"Invalid value for 'min_tokens': must be at most max_tokens (0), got {body.min_tokens}."
        raise BadRequest(message, param="min_tokens", code="invalid_value")
    return body
