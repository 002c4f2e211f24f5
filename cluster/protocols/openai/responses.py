"""OpenAI answers and stream chunks, built from deltas; shapes follow OpenAI's description, version 2.3.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.choice_streams import ChoiceDelta
from cluster.prepared_generation import PreparedGeneration
from cluster.protocols.openai.logprobs import CompletionLogprobs, chat_logprobs
from cluster.served_model import ServedModel
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
        return {**_head(self._prepared, self._model, "chat.completion"), **echoed, "choices": choices, "usage": usage}


class CompletionAnswer(_WholeAnswer):
    """A `CreateCompletionResponse`."""

    def body(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        choices = []
        for index in range(self._prepared.num_choices):
            echo = self._prepared.echo(index)
            logprobs = CompletionLogprobs(self._model.tokenizer, len(echo)).take(self._tokens(index))
            choices.append(
                {
                    "index": index,
                    "text": echo + self._text(index),
                    "logprobs": logprobs if self._prepared.params.logprobs is not None else None,
                    **self._ending(index),
                }
            )
        return {**_head(self._prepared, self._model, "text_completion"), "choices": choices, "usage": usage}


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
        self._logprobs = [CompletionLogprobs(model.tokenizer, len(prepared.echo(index))) for index in range(prepared.num_choices)]

    def start(self) -> list[dict[str, Any]]:
        """The echoed prompts, if any."""
        echoes = [(index, self._prepared.echo(index)) for index in range(self._prepared.num_choices)]
        return [self._chunk(index, text, None, {"finish_reason": None}) for index, text in echoes if text]

    def delta(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return []
        wants_logprobs = self._prepared.params.logprobs is not None
        logprobs = self._logprobs[delta.index].take(delta.logprobs) if wants_logprobs else None
        return [self._chunk(delta.index, delta.text, logprobs, _ending(delta))]

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
