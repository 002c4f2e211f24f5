"""A few steps of a grammar over a vocabulary of bytes, to see what only steps show."""

from __future__ import annotations

import random
from collections.abc import Sequence

import llguidance
import numpy as np

from replicas.grammar.llguidance_text import one_line, parser_limits

NUM_STEPS = 64
MAX_FORCED_BYTES = 16 * 1024
"""A text that is forced in one piece. Each mask within it tokenizes all that is left."""
_EOS = 256
_NUM_WORDS = 9


class _Bytes:
    """The vocabulary, in the form in which llguidance takes one from Python."""

    eos_token_id = _EOS
    bos_token_id = None
    tokens: Sequence[bytes] = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    special_token_ids: Sequence[int] = [_EOS]
    is_tokenizer_wrapper = True

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Trial:
    """Compiles grammars as an engine does, and walks into them. Some grammars pass `refusal` and then take minutes to compile, or are
    too complex a few characters in; here the one shows by the time it takes, the other by its error."""

    def __init__(self) -> None:
        self._vocabulary = llguidance.LLTokenizer(_Bytes())  # type: ignore[arg-type]

    def refusal(self, grammar: str, num_steps: int = NUM_STEPS) -> str | None:
        """Why an engine should not get this text of `grammar_text`; None: it may. The walk is the same each time."""
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=parser_limits())
        row = np.zeros(_NUM_WORDS, dtype=np.int32)
        draw = random.Random(0)
        for _ in range(num_steps):
            if matcher.is_error() or matcher.is_stopped():
                break
            if (size := len(matcher.compute_ff_bytes())) > MAX_FORCED_BYTES:
                return f"the grammar forces a text of {size} bytes in one piece; at most {MAX_FORCED_BYTES} are allowed"
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[:_EOS].nonzero()[0]
            if matcher.is_error() or len(allowed) == 0:
                break
            matcher.consume_token(int(draw.choice(allowed)))
        return one_line(matcher.get_error()) if matcher.is_error() else None
