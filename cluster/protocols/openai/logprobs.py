"""Log-probabilities as each OpenAI endpoint writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.generation.choice_delta import ChoiceDelta
from cluster.protocols.openai.answer_form import AnswerForm
from replicas.request import TokenLogprob
from replicas.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # what OpenAI's description gives for a token that is very unlikely; JSON has no infinity


def chat_logprobs(tokens: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` object of a chat choice, one `ChatCompletionTokenLogprob` per token."""
    content = [
        {
            **_entry(token.token_id, token.logprob, tokenizer),
            "top_logprobs": [_entry(top_id, value, tokenizer) for top_id, value in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokens: Sequence[TokenLogprob], num_top: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """The extension `prompt_logprobs`, in the shape that vLLM gave it: one object per prompt token, from ids to entries, null first.

    `rank` is null for a token that is not among the best ones asked for.
    """
    listed: list[dict[str, Any] | None] = [None]
    for token in tokens:
        entries = {
            str(top_id): {"logprob": _finite(value), "rank": rank, "decoded_token": tokenizer.token_text(top_id)}
            for rank, (top_id, value) in enumerate(token.top[:num_top], 1)
        }
        own = {"logprob": _finite(token.logprob), "rank": None, "decoded_token": tokenizer.token_text(token.token_id)}
        listed.append({str(token.token_id): own, **entries})
    return listed


class CompletionLogprobs:
    """The `logprobs` object of one choice of a text completion. Owns the offset at which the next token's text begins.

    Offsets count characters of the choice's text, the echo included. A token that is a part of a character stands at that
    character; one that text leaves out (a special token) takes no room.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._tokenizer = form.model.tokenizer
        self._num_top = form.generation.params.logprobs or 0
        self._skips_special = form.generation.params.skip_special_tokens
        self._offset = 0

    def take_echo(self, index: int, first: ChoiceDelta) -> dict[str, list[Any]]:
        """The echoed prompt of choice `index`, whose first delta is `first`. Called first; empty without such an echo."""
        echo = self._form.echo(index)
        found = _empty_logprobs()
        if self._form.echoes_logprobs:
            first_id, *_ = self._form.generation.prompt_ids(index)
            self._append(found, first_id, None, {}, echo)
            for token in first.prompt_logprobs or ():
                self._append(found, token.token_id, _finite(token.logprob), self._top(token), echo)
        self._offset = len(echo)
        return found

    def take(self, tokens: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """Generated tokens."""
        found = _empty_logprobs()
        for token in tokens:
            self._append(found, token.token_id, _finite(token.logprob), self._top(token), None)
        return found

    def _append(self, found: dict[str, list[Any]], token_id: int, logprob: float | None, top: dict[str, float], source: str | None) -> None:
        """`source` is the text that the token is a part of, where it is known."""
        text = self._tokenizer.token_text(token_id)
        found["tokens"].append(text)
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(None if logprob is None else top)
        if source is None:
            found["text_offset"].append(self._offset)
            is_shown = not self._skips_special or token_id not in self._tokenizer.special_token_ids
        else:
            found["text_offset"].append(min(self._offset, len(source)))
            is_shown = token_id not in self._tokenizer.special_token_ids or source.startswith(text, self._offset)
        if is_shown:
            self._offset += sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token_id))  # bytes that begin a character

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """The best ones and the token itself; of several with one text (parts of characters) the most probable."""
        best: dict[str, float] = {}
        for token_id, value in (*token.top[: self._num_top], (token.token_id, token.logprob)):
            best.setdefault(self._tokenizer.token_text(token_id), _finite(value))
        return best


def _empty_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"token": tokenizer.token_text(token_id), "logprob": _finite(logprob), "bytes": list(tokenizer.token_bytes(token_id))}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
