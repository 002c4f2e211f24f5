"""Answers to a text completion, whole and as chunks, which have the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.usage import Usage
from cluster.protocols.openai.answer_form import AnswerForm
from cluster.protocols.openai.answer_parts import ChunkEvents, WholeAnswer, ending, head, usage_body
from cluster.protocols.openai.logprobs import CompletionLogprobs

_KIND = "text_completion"


class CompletionAnswer(WholeAnswer):
    """A `CreateCompletionResponse`."""

    def body(self, usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": self._form.echo(index) + self._text(index),
                "logprobs": self._logprobs(index),
                **self._prompt_logprobs(index),
                **self._ending(index),
            }
            for index in range(self._form.generation.num_choices)
        ]
        return {**head(self._form, _KIND), "choices": choices, "usage": usage_body(usage)}

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        if self._form.generation.params.logprobs is None:
            return None
        writer = CompletionLogprobs(self._form)
        echoed = writer.take_echo(index, self._deltas[index][0])
        answer = writer.take(self._tokens(index))
        return {name: [*echoed[name], *answer[name]] for name in answer}


class CompletionEvents(ChunkEvents):
    """`CreateCompletionResponse`s, each with a part of one choice."""

    def __init__(self, form: AnswerForm) -> None:
        super().__init__(form, _KIND)
        num_choices = form.generation.num_choices
        self._wants_logprobs = form.generation.params.logprobs is not None
        self._logprobs = [CompletionLogprobs(form) for _ in range(num_choices)]
        self._has_begun = [False] * num_choices

    def start(self) -> bytes:
        """The echoed prompts, if any; those with log-probabilities come with the first delta of each choice."""
        if self._form.echoes_logprobs:
            return b""
        echoes = [(index, self._form.echo(index)) for index in range(self._form.generation.num_choices)]
        return self._events(_choice(index, text, None, {"finish_reason": None}) for index, text in echoes if text)

    def delta(self, delta: ChoiceDelta) -> bytes:
        choices, logprobs = [], None
        if self._wants_logprobs:
            if not self._has_begun[delta.index]:
                self._has_begun[delta.index] = True
                echoed = self._logprobs[delta.index].take_echo(delta.index, delta)
                if self._form.echoes_logprobs:
                    choices.append(_choice(delta.index, self._form.echo(delta.index), echoed, {"finish_reason": None}))
            logprobs = self._logprobs[delta.index].take(delta.logprobs)
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            choices.append(_choice(delta.index, delta.text, logprobs, ending(delta)))
        return self._events(choices)


def _choice(index: int, text: str, logprobs: Mapping[str, Any] | None, end: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, **end}
