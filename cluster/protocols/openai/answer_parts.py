"""Parts that the answers of OpenAI's endpoints share; shapes follow OpenAI's description, version 2.3.0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.usage import Usage
from cluster.protocols.openai.answer_form import AnswerForm
from cluster.protocols.openai.logprobs import prompt_logprobs
from cluster.protocols.server_sent_events import json_event
from replicas.request import TokenLogprob

DONE = b"data: [DONE]\n\n"


class WholeAnswer:
    """Collects the deltas of a request that does not stream."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._deltas: list[list[ChoiceDelta]] = [[] for _ in range(form.generation.num_choices)]  # choice index -> its deltas

    def add(self, delta: ChoiceDelta) -> None:
        self._deltas[delta.index].append(delta)

    def _text(self, index: int) -> str:
        return "".join(delta.text for delta in self._deltas[index])

    def _tokens(self, index: int) -> list[TokenLogprob]:
        return [token for delta in self._deltas[index] for token in delta.logprobs]

    def _prompt_logprobs(self, index: int) -> dict[str, Any]:
        """The extension's member of an answer, if it was asked for."""
        num_top, first = self._form.num_prompt_logprobs, self._deltas[index][0]
        if num_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(first.prompt_logprobs or (), num_top, self._form.model.tokenizer)}

    def _ending(self, index: int) -> dict[str, Any]:
        return ending(self._deltas[index][-1])


class ChunkEvents:
    """Makes events of the chunks of one streamed answer, all of which begin with the same members."""

    def __init__(self, form: AnswerForm, kind: str) -> None:
        self._form = form
        self._head = head(form, kind)
        self._null_usage = {"usage": None} if form.include_usage else {}

    def end(self, usage: Usage) -> bytes:
        """A chunk with the usage, if it was asked for, and the end of the stream."""
        if not self._form.include_usage:
            return DONE
        return json_event({**self._head, "choices": [], "usage": usage_body(usage)}) + DONE

    def _events(self, choices: Iterable[Mapping[str, Any]]) -> bytes:
        """One chunk for each entry of `choices`."""
        return b"".join([json_event({**self._head, "choices": [choice], **self._null_usage}) for choice in choices])


def head(form: AnswerForm, kind: str) -> dict[str, Any]:
    """The first members of an answer or a chunk."""
    return {
        "id": form.generation.response_id,
        "object": kind,
        "created": form.created_s,
        "model": form.generation.model,
        "system_fingerprint": form.model.fingerprint,
    }


def ending(delta: ChoiceDelta) -> dict[str, Any]:
    """`stop_reason`, an extension, tells which stop string or token ended the choice."""
    if delta.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": delta.finish_reason.value, "stop_reason": delta.stop_reason}


def usage_body(usage: Usage) -> dict[str, Any]:
    """A `CompletionUsage`."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.num_accepted_predicted,
            "rejected_prediction_tokens": usage.num_rejected_predicted,
        },
    }
