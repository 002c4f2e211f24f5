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
    that later tokens may still change is held back: an unfinished UTF-8 character, or a run of byte tokens. What is out
    after some tokens depends on those tokens, not on how they were split into calls, so `output_ids` of an earlier
    attempt put a new object exactly where the old one was.
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
        """The text that is final now and was not before."""
        return "".join([self._decoder.add(token_id) for token_id in token_ids if token_id not in self._skipped])

    def flush(self) -> str:
        """What was held back, as it stands. The output has ended: nothing may be pushed afterwards."""
        return self._decoder.finish()


class _Decoder(Protocol):
    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelDecoder:
    """Tokens are bytes, so all there is to hold is at most three bytes of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        return "" if token is None else self._utf8.decode(byte_level_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decodes the newest tokens together with the few before them, and gives out the difference.

    A token may render differently at the start of a text (sentencepiece drops its space), so the window always starts with
    tokens that are already out. It holds ids[:num_out], whose text `_out` is out, and pending ones after them. The window
    moves only where text cannot change any more: not inside a run of byte tokens and, for a tokenizer without a known
    decoder, not while the pending tokens show nothing or end in U+FFFD (for at most `_MAX_PENDING` of them).
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
            # The run that ends here is decoded apart from what ends it: both are then windows of their own.
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
