"""OpenAI answers and stream chunks, built from deltas; shapes follow OpenAI's description, version 2.3.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.generation.choice_delta import ChoiceDelta
from cluster.generation.prepared_generation import PreparedGeneration
from cluster.generation.served_model import ServedModel
from cluster.protocols.openai.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from replicas.request import TokenLogprob


class _WholeAnswer:
    """Collects the deltas of a request that does not stream."""

    def __init__(self, prepared: PreparedGeneration, model: ServedModel) -> None:
        self._prepared = prepared
        self._model = model
        self._deltas: list[list[ChoiceDelta]] = [[] for _ in range(prepared.num_choices)]  # choice index -> its deltas

    def add(self, delta: ChoiceDelta) -> None:
        self._deltas[delta.index].append(delta)

    def _text(self, index: int) -> str:
        return "".join(delta.text for delta in self._deltas[index])

    def _tokens(self, index: int) -> list[TokenLogprob]:
        return [token for delta in self._deltas[index] for token in delta.logprobs]

    def _prompt_logprobs(self, index: int) -> dict[str, Any]:
        """The extension's member of an answer, if it was asked for."""
        num_top, first = self._prepared.num_prompt_logprobs, self._deltas[index][0]
        if num_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(first.prompt_logprobs or (), num_top, self._model.tokenizer)}

    def _ending(self, index: int) -> dict[str, Any]:
        return _ending(self._deltas[index][-1])


class ChatAnswer(_WholeAnswer):
    """A `CreateChatCompletionResponse`."""

    def __init__(self, prepared: PreparedGeneration, model: ServedModel, metadata: Mapping[str, str] | None) -> None:
        super().__init__(prepared, model)
        self._metadata = metadata

    def body(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        wants_logprobs = self._prepared.params.logprobs is not None
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": self._text(index), "refusal": None},
                "logprobs": chat_logprobs(self._tokens(index), self._model.tokenizer) if wants_logprobs else None,
                **self._ending(index),
            }
            for index in range(self._prepared.num_choices)
        ]
        echoed = {"metadata": dict(self._metadata)} if self._metadata else {}
        head = _head(self._prepared, self._model, "chat.completion")
        return {**head, **echoed, "choices": choices, "usage": usage, **self._prompt_logprobs(0)}


class CompletionAnswer(_WholeAnswer):
    """A `CreateCompletionResponse`."""

    def body(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": self._prepared.echo(index) + self._text(index),
                "logprobs": self._logprobs(index),
                **self._prompt_logprobs(index),
                **self._ending(index),
            }
            for index in range(self._prepared.num_choices)
        ]
        return {**_head(self._prepared, self._model, "text_completion"), "choices": choices, "usage": usage}

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        if self._prepared.params.logprobs is None:
            return None
        writer = CompletionLogprobs(self._model.tokenizer, self._prepared.params)
        echoed = writer.take_echo(self._prepared, index, self._deltas[index][0])
        answer = writer.take(self._tokens(index))
        return {name: [*echoed[name], *answer[name]] for name in answer}


class ChatChunks:
    """`CreateChatCompletionStreamResponse` chunks; each carries `usage: null` when the client asked for the usage."""

    def __init__(self, prepared: PreparedGeneration, model: ServedModel) -> None:
        self._prepared = prepared
        self._model = model
        self._head = _head(prepared, model, "chat.completion.chunk")
        self._null_usage = {"usage": None} if prepared.include_usage else {}

    def start(self) -> list[dict[str, Any]]:
        """The first chunk of each choice: the role, and no text."""
        role = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(index, role) for index in range(self._prepared.num_choices)]

    def delta(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The delta's text, and a chunk of its own for the ending, as OpenAI sends it."""
        chunks = []
        if delta.text or delta.logprobs:
            wants_logprobs = self._prepared.params.logprobs is not None
            logprobs = chat_logprobs(delta.logprobs, self._model.tokenizer) if wants_logprobs else None
            chunks.append(self._chunk(delta.index, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.index, {}, None, _ending(delta)))
        return chunks

    def usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last chunk."""
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(
        self, index: int, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None, ending: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **(ending or {"finish_reason": None})}
        return {**self._head, "choices": [choice], **self._null_usage}


class CompletionChunks:
    """Chunks of a text completion, which have the shape of its whole answer."""

    def __init__(self, prepared: PreparedGeneration, model: ServedModel) -> None:
        self._prepared = prepared
        self._head = _head(prepared, model, "text_completion")
        self._null_usage = {"usage": None} if prepared.include_usage else {}
        self._logprobs = [CompletionLogprobs(model.tokenizer, prepared.params) for _ in range(prepared.num_choices)]
        self._has_begun = [False] * prepared.num_choices

    def start(self) -> list[dict[str, Any]]:
        """The echoed prompts, if any; those with log-probabilities come with the first delta of each choice."""
        if self._prepared.echoes_logprobs:
            return []
        echoes = [(index, self._prepared.echo(index)) for index in range(self._prepared.num_choices)]
        return [self._chunk(index, text, None, {"finish_reason": None}) for index, text in echoes if text]

    def delta(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        chunks, logprobs = [], None
        if self._prepared.params.logprobs is not None:
            if not self._has_begun[delta.index]:
                self._has_begun[delta.index] = True
                echoed = self._logprobs[delta.index].take_echo(self._prepared, delta.index, delta)
                if self._prepared.echoes_logprobs:
                    chunks.append(self._chunk(delta.index, self._prepared.echo(delta.index), echoed, {"finish_reason": None}))
            logprobs = self._logprobs[delta.index].take(delta.logprobs)
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            chunks.append(self._chunk(delta.index, delta.text, logprobs, _ending(delta)))
        return chunks

    def usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last chunk."""
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(self, index: int, text: str, logprobs: Mapping[str, Any] | None, ending: Mapping[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, **ending}
        return {**self._head, "choices": [choice], **self._null_usage}


def usage_body(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """A `CompletionUsage`."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def model_list(models: Sequence[ServedModel]) -> dict[str, Any]:
    """A `ListModelsResponse`."""
    return {"object": "list", "data": [model.model_card() for model in models]}


def _head(prepared: PreparedGeneration, model: ServedModel, kind: str) -> dict[str, Any]:
    return {
        "id": prepared.response_id,
        "object": kind,
        "created": prepared.created_s,
        "model": prepared.model,
        "system_fingerprint": model.fingerprint,
    }


def _ending(delta: ChoiceDelta) -> dict[str, Any]:
    """`stop_reason`, an extension, tells which stop string or token ended the choice."""
    if delta.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": delta.finish_reason.value, "stop_reason": delta.stop_reason}
