"""Token ids to text, a few at a time, equal to decoding them all at the end."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from replicas.text.token_bytes import BYTE_TOKEN, DecoderKind, byte_level_bytes
from replicas.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text of one growing output.

    All texts returned by `push`, joined, plus `flush`, equal `tokenizer.decode(output_ids, skip_special_tokens)`. Text
    that later tokens may still change is held back: an unfinished UTF-8 character, or a run of byte tokens. The text
    returned so far depends on the tokens, not on how they were split into calls, so the `output_ids` of an earlier
    attempt put a new object into exactly the state of the old one.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, output_ids: Sequence[int] = ()) -> None:
        self._decoder: _Decoder
        if tokenizer.decoder_kind is DecoderKind.BYTE_LEVEL:
            self._decoder = _ByteLevelDecoder(tokenizer)
        else:
            self._decoder = _WindowDecoder(tokenizer)
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self.push(output_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became final with these tokens."""
        return "".join([self._decoder.add(token_id) for token_id in token_ids if token_id not in self._skipped])

    def flush(self) -> str:
        """The text held back, as it is. Ends the output: nothing may be pushed afterwards."""
        return self._decoder.finish()


class _Decoder(Protocol):
    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelDecoder:
    """Tokens are bytes, so at most three bytes of an unfinished character are held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        return "" if token is None else self._utf8.decode(byte_level_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decodes the newest tokens together with a few before them, and returns the difference.

    A token may render differently at the start of a text (sentencepiece drops its space), so the window always starts with
    tokens whose text was already returned: `_ids[:_num_out]`, with the text `_out`. Pending tokens follow. The window moves
    only where text cannot change any more: not inside a run of byte tokens and, for a tokenizer without a known decoder, not
    while the pending tokens give no text or end in U+FFFD (for at most `_MAX_PENDING` of them).
    """

    _MAX_PENDING = 16

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kind = tokenizer.decoder_kind
        self._ids: list[int] = []
        self._num_out = 0
        self._out = ""

    def add(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        if self._kind is DecoderKind.BYTE_FALLBACK:
            if BYTE_TOKEN.fullmatch(token):
                self._ids.append(token_id)
                return ""
            # The run of byte tokens ends here and is decoded apart from the token that ends it, each in its own window.
            text = self._advance() if len(self._ids) > self._num_out else ""
            self._ids.append(token_id)
            return text + self._advance()
        self._ids.append(token_id)
        is_unsure = self._kind is DecoderKind.UNKNOWN and len(self._ids) - self._num_out < self._MAX_PENDING
        return self._advance(is_unsure)

    def finish(self) -> str:
        return self._advance()

    def _advance(self, is_unsure: bool = False) -> str:
        """The text of the pending tokens, which become the start of the next window."""
        if len(self._ids) == self._num_out:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        text = whole[len(self._out) :]
        if is_unsure and (not text or text.endswith(REPLACEMENT)):
            return ""
        del self._ids[: self._num_out]
        self._num_out = len(self._ids)
        self._out = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        return text
