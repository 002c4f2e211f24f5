"""What the calls of OpenAI's dialects have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.generation.prepared_generation import PreparedGeneration
from cluster.generation.request_context import RequestContext
from cluster.models.served_model import ServedModel
from cluster.protocols.dialect import AnswerWriter, StreamWriter
from cluster.protocols.openai.answer_form import AnswerForm
from cluster.protocols.openai.generation_fields import GenerationFields
from cluster.protocols.wire import unsupported
from replicas.grammar.checking.checks import CheckedGrammar
from replicas.response_format import AskedGrammar

Body = TypeVar("Body", bound=GenerationFields)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyCall(Generic[Body]):
    """A ParsedCall but for `prepare`, which each dialect adds."""

    body: Body
    prompt: object
    asked_grammar: AskedGrammar | None = None

    @property
    def model(self) -> str:
        return self.body.model

    @property
    def user(self) -> str | None:
        return self.body.user

    async def admitted_grammar(self, model: ServedModel, context: RequestContext) -> CheckedGrammar | None:
        """The grammar that the body asks for, checked. Raises BadRequest, Unavailable."""
        asked, options = self.asked_grammar, self.body.structured_outputs
        if asked is None:
            return None
        if model.grammars is None:
            raise unsupported(asked.param.split(".")[0])
        return await model.grammars.admit(
            asked,
            tenant=context.principal.tenant,
            unsupported=None if options is None else options.unsupported,
            begins_after=None if options is None else options.begins_after,
        )


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
