"""POST /tokenize and /detokenize, in the shape that vLLM gave them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from cluster.failures import BadRequest
from cluster.models.served_model import ServedModel
from cluster.protocols.openai.chat_request import ChatMessage
from cluster.protocols.openai.generation_fields import Identifier, Text
from cluster.protocols.wire import WireModel, parse_body, shown
from cluster.settings.limits import RequestLimits


class TokenizeRequest(WireModel):
    """Exactly one of `prompt` and `messages`."""

    model: Identifier
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[Identifier, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(WireModel):
    model: Identifier
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


def parse_tokenize_request(fields: Mapping[str, Any], limits: RequestLimits) -> TokenizeRequest:
    body = parse_body(TokenizeRequest, fields)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Exactly one of 'prompt' and 'messages' must be given.", param="prompt", code="invalid_value")
    if body.messages is not None and len(body.messages) > limits.max_messages:
        message = f"Invalid value for 'messages': this server allows at most {limits.max_messages}, got {len(body.messages)}."
        raise BadRequest(message, param="messages", code="invalid_value")
    return body


def parse_detokenize_request(fields: Mapping[str, Any]) -> DetokenizeRequest:
    return parse_body(DetokenizeRequest, fields)


async def tokenize(body: TokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """Token ids of a text, or of a rendered chat. Raises ChatTemplateError."""
    if body.messages is not None:
        continues = bool(body.continue_final_message)
        token_ids = await model.chat_prompt_ids(
            [message.for_template() for message in body.messages],
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            template_kwargs=body.chat_template_kwargs,
        )
    else:
        token_ids = await model.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": model.description.max_model_len, "tokens": token_ids}
    if body.return_token_strs:
        answer["token_strs"] = await model.token_texts(token_ids)
    return answer


async def detokenize(body: DetokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """The text of token ids, special tokens included. Raises BadRequest for ids outside the vocabulary."""
    size = model.description.vocab_size
    for token_id in body.tokens:
        if token_id >= size:
            raise BadRequest(
                f"Invalid value for 'tokens': token ids of this model are from 0 to {size - 1}, got {shown(token_id)}.",
                param="tokens",
                code="invalid_value",
            )
    return {"prompt": await model.decode(body.tokens)}
