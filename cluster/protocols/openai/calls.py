"""What the calls of OpenAI's dialects have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.generation.prepared_generation import PreparedGeneration
from cluster.protocols.dialect import AnswerWriter, StreamWriter
from cluster.protocols.openai.answer_form import AnswerForm
from cluster.protocols.openai.generation_fields import GenerationFields

Body = TypeVar("Body", bound=GenerationFields)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyCall(Generic[Body]):
    """A ParsedCall but for `prepare`, which each dialect adds."""

    body: Body
    prompt: object

    @property
    def model(self) -> str:
        return self.body.model

    @property
    def user(self) -> str | None:
        return self.body.user


@dataclass(frozen=True, slots=True, kw_only=True)
class FormCall:
    """A PreparedCall: an answer's form, and who writes it as events or whole."""

    form: AnswerForm
    events: Callable[[AnswerForm], StreamWriter]
    whole: Callable[[AnswerForm], AnswerWriter]

    @property
    def generation(self) -> PreparedGeneration:
        return self.form.generation

    def stream_writer(self) -> StreamWriter:
        return self.events(self.form)

    def answer_writer(self) -> AnswerWriter:
        return self.whole(self.form)
