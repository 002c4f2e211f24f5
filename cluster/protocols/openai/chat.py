"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.failures import BadRequest
from cluster.generation.request_context import RequestContext
from cluster.models.served_model import ServedModel
from cluster.protocols.openai.calls import BodyCall, FormCall
from cluster.protocols.openai.chat_answers import ChatAnswer, ChatEvents
from cluster.protocols.openai.chat_request import UNSUPPORTED, ChatCompletionRequest
from cluster.protocols.openai.conversion import far_over_context, prepare, too_many
from cluster.protocols.openai.errors import ErrorWriter
from cluster.protocols.openai.grammar_fields import asked_grammar
from cluster.protocols.wire import parse_body, parse_json_object, refuse_unsupported
from cluster.settings.limits import RequestLimits
from replicas.text.tokenizer import TextTooLong


class ChatDialect(ErrorWriter):
    """A Dialect."""

    path = "/v1/chat/completions"

    def parse(self, body: bytes, limits: RequestLimits) -> ParsedChat:
        fields = parse_json_object(body)
        parsed = _parse(fields, limits)
        return ParsedChat(body=parsed, prompt=fields.get("messages"), asked_grammar=asked_grammar(parsed))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedChat(BodyCall[ChatCompletionRequest]):
    """A ParsedCall."""

    async def prepare(self, model: ServedModel, context: RequestContext) -> FormCall:
        body = self.body
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
            raise far_over_context("messages", model) from error
        predicted_ids: list[int] = []
        if body.prediction is not None and body.prediction.content:
            try:
                predicted_ids = await model.encode(body.prediction.content, add_special_tokens=False, limit=model.description.max_model_len)
            except TextTooLong as error:
                raise far_over_context("prediction", model) from error
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        form = prepare(
            body,
            model,
            context,
            response_id=f"chatcmpl-{secrets.token_hex(12)}",
            prompts=[tuple(prompt_ids)],
            prompt_param="messages",
            grammar=await self.admitted_grammar(model, context),
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            predicted_ids=tuple(predicted_ids),
        )
        return FormCall(form=form, events=ChatEvents, whole=ChatAnswer)


def _parse(fields: Mapping[str, Any], limits: RequestLimits) -> ChatCompletionRequest:
    body = parse_body(ChatCompletionRequest, refuse_unsupported(fields, UNSUPPORTED))
    body.check_limits(limits)
    if len(body.messages) > limits.max_messages:
        raise too_many("messages", len(body.messages), limits.max_messages)
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
