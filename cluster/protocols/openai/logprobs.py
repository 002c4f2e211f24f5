"""Log-probabilities as each OpenAI endpoint writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class CompletionLogprobs:
    """The `logprobs` object of a text completion. Owns the offset at which the next token's text begins."""

    def __init__(self, tokenizer: Tokenizer, offset: int) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def take(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Offsets count characters; tokens that are parts of one character count as their own replacement text."""
        texts = [self._tokenizer.token_text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._tokenizer.token_text(top_id): _finite(value) for top_id, value in (token.top or ((token.token_id, token.logprob),))}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"token": tokenizer.token_text(token_id), "logprob": _finite(logprob), "bytes": list(tokenizer.token_bytes(token_id))}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
