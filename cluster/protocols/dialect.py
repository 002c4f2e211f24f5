"""The work of an HTTP format of generation. One object of this Protocol is one route; nothing else knows its format.

A body is parsed before its model is known, then prepared for the model, and answered as a stream of events or whole.
"""

from __future__ import annotations

from typing import Any, Protocol

from cluster.failures import ErrorAnswer
from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.prepared_generation import PreparedGeneration
from cluster.generation.request_context import RequestContext
from cluster.generation.usage import Usage
from cluster.models.served_model import ServedModel
from cluster.settings.limits import RequestLimits


class StreamWriter(Protocol):
    """Writes the events of one streamed answer, in this order. Each result is bytes to send, perhaps none."""

    def start(self) -> bytes:
        """Bytes before the first delta; sent together with it, so that failing before it keeps its own status."""
        ...

    def delta(self, delta: ChoiceDelta) -> bytes: ...

    def end(self, usage: Usage) -> bytes:
        """The last bytes of an answer that ended well."""
        ...


class AnswerWriter(Protocol):
    """Collects the deltas of one answer that does not stream."""

    def add(self, delta: ChoiceDelta) -> None: ...

    def body(self, usage: Usage) -> dict[str, Any]:
        """The answer as a JSON object."""
        ...


class PreparedCall(Protocol):
    """A request that fits its model, and how its answer is written."""

    @property
    def generation(self) -> PreparedGeneration: ...

    def stream_writer(self) -> StreamWriter: ...

    def answer_writer(self) -> AnswerWriter: ...


class ParsedCall(Protocol):
    """A body that is right in itself."""

    @property
    def model(self) -> str:
        """As the client names it."""
        ...

    @property
    def user(self) -> str | None:
        """The end user that the client names, for the log."""
        ...

    @property
    def prompt(self) -> object:
        """As the client sent it, for logs that are configured to have it."""
        ...

    async def prepare(self, model: ServedModel, context: RequestContext) -> PreparedCall:
        """Renders, tokenizes and checks against the model. Raises BadRequest, ChatTemplateError."""
        ...


class Dialect(Protocol):
    """One HTTP format. Has no state."""

    @property
    def path(self) -> str:
        """Where bodies of this format are posted."""
        ...

    def parse(self, body: bytes, limits: RequestLimits) -> ParsedCall:
        """Raises BadRequest naming the first parameter that is wrong or not supported."""
        ...

    def error_body(self, answer: ErrorAnswer) -> dict[str, Any]:
        """The answer to a request that failed, as a JSON object."""
        ...

    def error_event(self, answer: ErrorAnswer) -> bytes:
        """The last event of a stream that failed after it had begun."""
        ...
