"""The bytes that a token stands for, by the tokenizer's decoder (in the format of Hugging Face `tokenizer.json`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""How sentencepiece-like vocabularies write a byte that no token covers."""


class DecoderKind(Enum):
    """How token strings become text, as far as it matters for incremental decoding."""

    BYTE_LEVEL = "byte_level"
    """Every character of a token string is one byte (GPT-2); tokens join as bytes, then decode as UTF-8."""
    BYTE_FALLBACK = "byte_fallback"
    """Token strings are text; a run of byte tokens decodes together (valid UTF-8, or one U+FFFD per byte)."""
    PIECES = "pieces"
    """Token strings are text; the text of a token depends at most on whether it is the first."""
    UNKNOWN = "unknown"
    """A tokenizer without a known decoder: characters may span tokens in any way."""


def decoder_kind(decoder: Mapping[str, Any] | None) -> DecoderKind:
    """The kind of a decoder as in `tokenizer.json` (None joins tokens with spaces)."""
    types = [str(part["type"]) for part in _parts(decoder)]
    if types == ["ByteLevel"]:
        return DecoderKind.BYTE_LEVEL
    if "ByteLevel" in types or "CTC" in types:
        return DecoderKind.UNKNOWN
    return DecoderKind.BYTE_FALLBACK if "ByteFallback" in types else DecoderKind.PIECES


def space_markers(decoder: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Strings that stand for a space inside tokens (U+2581 in sentencepiece vocabularies)."""
    markers = []
    for part in _parts(decoder):
        if part["type"] == "Metaspace":
            markers.append(str(part["replacement"]))
        elif part["type"] == "Replace" and part["content"] == " " and "String" in part["pattern"]:
            markers.append(str(part["pattern"]["String"]))
    return tuple(markers)


def _parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in printable):
        table[chr(0x100 + offset)] = byte
    return table


_BYTE_OF_CHAR = _byte_of_char()
_CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with a character outside the alphabet (an added token) is plain UTF-8."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def byte_tokens(text: bytes, kind: DecoderKind) -> list[str] | None:
    """The tokens that stand for one byte of `text` each; None where the vocabulary has no tokens of bytes."""
    if kind is DecoderKind.BYTE_LEVEL:
        return [_CHAR_OF_BYTE[byte] for byte in text]
    if kind is DecoderKind.BYTE_FALLBACK:
        return [f"<0x{byte:02X}>" for byte in text]
    return None
