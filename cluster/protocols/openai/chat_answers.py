"""Answers to a chat, whole and as chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.usage import Usage
from cluster.protocols.openai.answer_form import AnswerForm
from cluster.protocols.openai.answer_parts import ChunkEvents, WholeAnswer, ending, head, usage_body
from cluster.protocols.openai.logprobs import chat_logprobs


class ChatAnswer(WholeAnswer):
    """A `CreateChatCompletionResponse`."""

    def body(self, usage: Usage) -> dict[str, Any]:
        form = self._form
        wants_logprobs = form.generation.params.logprobs is not None
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": self._text(index), "refusal": None},
                "logprobs": chat_logprobs(self._tokens(index), form.model.tokenizer) if wants_logprobs else None,
                **self._ending(index),
            }
            for index in range(form.generation.num_choices)
        ]
        echoed = {"metadata": dict(form.metadata)} if form.metadata else {}
        first = {**head(form, "chat.completion"), **echoed}
        return {**first, "choices": choices, "usage": usage_body(usage), **self._prompt_logprobs(0)}


class ChatEvents(ChunkEvents):
    """`CreateChatCompletionStreamResponse`s."""

    def __init__(self, form: AnswerForm) -> None:
        super().__init__(form, "chat.completion.chunk")
        self._wants_logprobs = form.generation.params.logprobs is not None

    def start(self) -> bytes:
        """The first chunk of each choice: the role, and no text."""
        role = {"role": "assistant", "content": "", "refusal": None}
        return self._events(_choice(index, role) for index in range(self._form.generation.num_choices))

    def delta(self, delta: ChoiceDelta) -> bytes:
        """The delta's text, and a chunk of its own for the ending, as OpenAI sends it."""
        choices = []
        if delta.text or delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._form.model.tokenizer) if self._wants_logprobs else None
            choices.append(_choice(delta.index, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            choices.append(_choice(delta.index, {}, None, ending(delta)))
        return self._events(choices)


def _choice(
    index: int, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None, end: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, **(end or {"finish_reason": None})}
