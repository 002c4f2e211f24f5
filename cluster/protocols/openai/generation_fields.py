"""The parameters that chat and text completions share, and what they become inside."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from cluster.failures import BadRequest
from cluster.protocols.wire import WireModel, is_number_within, json_type, shown
from cluster.settings.limits import RequestLimits
from cluster.settings.priorities import MAX_PRIORITY
from replicas.sampling_params import MAX_LOGPROBS

MAX_SEED = 2**63
_MAX_COUNT = 2**31 - 1


def without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("must be text without lone surrogates") from error
    return text


Text = Annotated[str, AfterValidator(without_surrogates)]
Identifier = Annotated[Text, Field(max_length=512)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_COUNT)]


def _stop_strings(value: object) -> tuple[str, ...]:
    """One string or an array of strings. By hand, so that the error says what was expected rather than which union arm failed."""
    if value is None:
        return ()
    if isinstance(value, str):
        strings = [value]
    elif isinstance(value, list):
        strings = value
    else:
        raise ValueError(f"must be a string or an array of strings, got {json_type(value)}")
    for index, text in enumerate(strings):
        if not isinstance(text, str):
            raise ValueError(f"must hold strings only, got {json_type(text)} at {index}")
        if not text:
            raise ValueError(f"must hold non-empty strings, got an empty one at {index}")
        without_surrogates(text)
    return tuple(strings)


def _logit_bias(value: object) -> dict[int, float] | None:
    """Keys are token ids written as strings, as JSON needs; values from -100 to 100."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"must be an object from token ids to numbers, got {json_type(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"must have token ids as keys, got {shown(key)}")
        if not is_number_within(bias, -100, 100):
            raise ValueError(f"must have values from -100 to 100, got {shown(bias)} for token {key}")
        biases[int(key)] = float(bias)
    return biases


def _text_or_object(value: object) -> object:
    """JSON, or its text. By hand for the same reason."""
    if value is None or isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise ValueError(f"must be an object, or its JSON text as a string, got {json_type(value)}")
    return without_surrogates(value)


TextOrObject = Annotated[Any, BeforeValidator(_text_or_object)]


class StreamOptions(WireModel):
    include_usage: bool | None = None
    """A last chunk with the usage of the whole request, and no choices."""
    include_obfuscation: bool | None = None
    """Accepted for its default meaning here, none: this server pads nothing."""


class StructuredOutputs(WireModel):
    """vLLM's way to ask for a grammar: one of the first six. The others hold for every grammar, also for one of `response_format`."""

    choice: list[Any] | None = None
    grammar: Text | None = None
    json_: TextOrObject = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    structural_tag: TextOrObject = None

    begins_after: Annotated[Text, Field(max_length=64)] | None = None
    """Text behind which the grammar begins, such as the end of a thought; empty: at once, whatever the model's configuration says."""
    disable_any_whitespace: bool | None = None
    """False lets JSON have whitespace outside of strings; by default it has none."""
    unsupported: Literal["refuse", "warn"] | None = None
    """What happens to keywords of a schema that cannot be enforced; by default what the configuration says."""


class GenerationFields(WireModel):
    """Fields of both endpoints. The second block holds extensions, named as vLLM and SGLang name them."""

    model: Identifier
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[Any, BeforeValidator(_logit_bias)] = None
    max_tokens: int | None = Field(default=None, ge=0, le=_MAX_COUNT)
    metadata: dict[Identifier, Identifier] | None = Field(default=None, max_length=16)
    n: int | None = Field(default=None, ge=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    prompt_cache_key: Identifier | None = None
    """Asks for what the router does anyway: equal prompts meet on one replica."""
    safety_identifier: Identifier | None = None
    seed: int | None = Field(default=None, ge=-MAX_SEED, lt=MAX_SEED)
    stop: Annotated[Any, BeforeValidator(_stop_strings)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    user: Identifier | None = None

    response_format: dict[str, Any] | None = None
    """Read by `grammar_fields`, like the next five. Text completions take it too, as an extension."""
    structured_outputs: StructuredOutputs | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: Text | None = None
    guided_json: TextOrObject = None
    guided_regex: Text | None = None

    cache_salt: Identifier | None = None
    """Only requests with the same salt share cached prefixes."""
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    min_tokens: int | None = Field(default=None, ge=0, le=_MAX_COUNT)
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Alternatives for each prompt token; the answer then has a list `prompt_logprobs`."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    skip_special_tokens: bool | None = None
    speculation: Literal["auto", "off"] | None = None
    """off: no tokens are drafted for this request. The answer is the same."""
    stop_token_ids: list[TokenId] | None = None
    top_k: int | None = Field(default=None, ge=-1, le=_MAX_COUNT)
    """0 or -1 keep every token."""

    def check_limits(self, limits: RequestLimits) -> None:
        """Raises BadRequest when a list is longer, or a count higher, than this server allows."""
        stop: tuple[str, ...] = self.stop
        _at_most("n", self.n or 1, limits.max_n, "choices")
        _at_most("stop", len(stop), limits.max_stop_strings, "strings")
        for index, text in enumerate(stop):
            _at_most(f"stop[{index}]", len(text), limits.max_stop_chars, "characters")
        _at_most("stop_token_ids", len(self.stop_token_ids or ()), limits.max_stop_token_ids, "token ids")
        _at_most("logit_bias", len(self.logit_bias or ()), limits.max_logit_bias, "entries")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest(
                "'prompt_logprobs' is only for answers that do not stream: leave out 'stream'.",
                param="prompt_logprobs",
                code="invalid_value",
            )
        if self.stream_options is not None and not self.stream:
            raise BadRequest(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.", param="stream_options", code="invalid_value"
            )


def _at_most(param: str, count: int, limit: int, unit: str) -> None:
    if count > limit:
        message = f"Invalid value for '{param}': this server allows at most {limit} {unit}, got {shown(count)}."
        raise BadRequest(message, param=param, code="invalid_value")
