"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cluster.protocols.openai.generation_fields import GenerationFields, Identifier, Text, without_surrogates
from cluster.protocols.wire import WireModel, json_type

# Parameter -> values that ask for nothing. Everything else about them is refused by name.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# Fields that answers have, and clients send back as they got them (the OpenAI client's `parsed` too), with what may stand in them.
_NEUTRAL_MESSAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "parsed": (),
    "tool_calls": ([],),
}
_TEXT_PARTS = ("text", "refusal")
"""Types of content parts; each has its text in the member of its own name."""


def _content(value: object) -> str | None:
    """A string, or parts with text, which are joined by newlines; null for an assistant that said nothing."""
    if value is None or isinstance(value, str):
        return None if value is None else without_surrogates(value)
    if not isinstance(value, list):
        raise ValueError(f"must be a string or an array of text parts, got {json_type(value)}")
    if not value:
        raise ValueError("must hold at least one part, got an empty array")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError(f"must hold parts with a 'type', got {json_type(part)} at {index}")
        kind = part["type"]
        if kind not in _TEXT_PARTS:
            raise ValueError(f"part {index} is of type {kind[:40]!r}, and this server takes only 'text'")
        if part.keys() != {"type", kind} or not isinstance(part[kind], str):
            raise ValueError(f"part {index} must have 'type' and a string '{kind}', and nothing else")
        texts.append(without_surrogates(part[kind]))
    return "\n".join(texts)


class ChatMessage(WireModel):
    """One turn. Roles of tools come with tool calling; fields that clients echo from an answer are taken when empty."""

    role: Literal["developer", "system", "user", "assistant"]
    content: Annotated[Any, BeforeValidator(_content)] = None
    refusal: Text | None = None
    """What the assistant said instead of an answer: text like `content`."""
    name: Identifier | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        for name, neutral_values in _NEUTRAL_MESSAGE_FIELDS.items():
            value = fields.get(name)
            if value is not None and value not in neutral_values:
                raise ValueError(f"'{name}' is not supported by this server in a message")
        if fields.get("role") in ("tool", "function"):
            raise ValueError(f"role '{fields['role']}' is not supported by this server, use developer, system, user or assistant")
        if fields.get("refusal") is not None and fields.get("role") != "assistant":
            raise ValueError("'refusal' is only for messages of role assistant")
        if fields.get("content") is None and fields.get("role") != "assistant":
            raise ValueError("'content' must be a string or an array of text parts in a message of this role")
        return {name: value for name, value in fields.items() if name not in _NEUTRAL_MESSAGE_FIELDS}

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it. Templates know no developer role: it is the newer name of system."""
        content = "\n".join(text for text in (self.content, self.refusal) if text)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        return message


class Prediction(WireModel):
    """`PredictionContent`: what the client expects as the answer."""

    type: Literal["content"]
    content: Annotated[Any, BeforeValidator(_content)]


class ChatCompletionRequest(GenerationFields):
    """See `CreateChatCompletionRequest` of OpenAI's description; the last three fields are extensions, as vLLM names them."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    prediction: Prediction | None = None
    """Drafts of the answer, used where the model's engine speculates. They change its speed alone."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[Identifier, Any] | None = None
    continue_final_message: bool | None = None
