"""Compiles grammars with llguidance for one vocabulary."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import llguidance
import numpy as np

from replicas.grammar.begin_marker import BeginMarker
from replicas.grammar.big_stack import BigStackThread
from replicas.grammar.compiler import GrammarError, GrammarStatistics
from replicas.grammar.ending_matcher import EndingMatcher
from replicas.grammar.json_ending import JsonEnding, least_tokens
from replicas.grammar.llguidance_matcher import LLGuidanceMatcher
from replicas.grammar.llguidance_text import grammar_text, one_line, parser_limits
from replicas.grammar.marked_matcher import MarkedMatcher
from replicas.grammar.matcher import GrammarMatcher
from replicas.grammar.token_rows import TokenRows
from replicas.grammar.vocabulary import special_token_names, without_special_names
from replicas.grammar_spec import GrammarKind, GrammarSpec

DEFAULT_MAX_CACHED = 64
_MAX_MARKERS = 16
_FREE_SHARE = 0.75
"""Part of `max_tokens` after which a JSON text is brought to its end, at the latest."""
_LEAST_RESERVE = 8
"""Tokens kept beside those of the shortest answer."""
_MOST_LEAST_TOKENS = 400
_MOST_MEASURED_CHARS = 32 * 1024
"""How far, and in schemas of what length, the shortest answer is looked for: the steps of long schemas may take milliseconds."""
_JSON = frozenset([GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT])


class _Compiled(NamedTuple):
    master: llguidance.LLMatcher
    """Never advanced."""
    num_least_tokens: int
    """About those of the shortest answer, in JSON; 0 if it was not looked for."""


class LLGuidanceCompiler:
    """A `GrammarCompiler`. Owns the vocabulary as llguidance reads it (built at the first grammar, some tenths of a second), the compiled
    grammars that were used last, and the thread on which it compiles, one grammar at a time."""

    def __init__(
        self,
        tokenizer_json: str,
        num_rows: int,
        eos_token_ids: Collection[int],
        *,
        max_cached: int = DEFAULT_MAX_CACHED,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tokenizer_json` is the text of a Hugging Face tokenizer.json; `num_rows` is the number of logits, at least the vocabulary's
        size: rows behind it are never allowed. Raises ValueError without EOS tokens, since no text could end."""
        if not eos_token_ids:
            raise ValueError("eos_token_ids must name at least one token: a text under a grammar ends with it")
        self._tokenizer_json = tokenizer_json
        self._num_rows = num_rows
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_cached = max_cached
        self._now_s = now_s
        self._thread = BigStackThread("grammar-compiler")
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._masters: OrderedDict[str, _Compiled] = OrderedDict()  # spec key -> its grammar, least recently used first
        self._statistics = GrammarStatistics()
        self._ending: JsonEnding | None = None  # with the vocabulary
        self._markers: dict[str, BeginMarker] = {}  # text -> its marker; a model has one, clients may name others

    def matcher(self, spec: GrammarSpec, *, max_tokens: int | None = None) -> GrammarMatcher:
        key = spec.key
        compiled = self._cached(key) or self._thread.call(lambda: self._compiled(spec, key))
        if spec.begins_after is None:
            return self._behind(compiled, spec, max_tokens, 0)
        text = spec.begins_after
        marker = self._markers.get(text) or self._thread.call(lambda: self._marker(text))
        return MarkedMatcher(marker, lambda num_before: self._behind(compiled, spec, max_tokens, num_before))

    def _behind(self, compiled: _Compiled, spec: GrammarSpec, max_tokens: int | None, num_before: int) -> GrammarMatcher:
        """A matcher that begins after `num_before` tokens of the answer."""
        assert self._ending is not None, "the vocabulary is read before the first grammar"
        matcher = LLGuidanceMatcher(compiled.master.deep_copy(), (self._num_rows + 31) // 32, self._eos_token_ids)
        if max_tokens is None or spec.kind not in _JSON:
            return matcher
        least = compiled.num_least_tokens
        ends_from = min(int(_FREE_SHARE * max_tokens), max_tokens - least - max(_LEAST_RESERVE, least // 4))
        return EndingMatcher(matcher, self._ending, ends_from - num_before)

    def statistics(self) -> GrammarStatistics:
        with self._lock:
            return self._statistics

    def close(self) -> None:
        """Ends the thread; `matcher` must not be called any more."""
        self._thread.close()

    def _cached(self, key: str) -> _Compiled | None:
        with self._lock:
            compiled = self._masters.get(key)
            if compiled is not None:
                self._masters.move_to_end(key)
                self._statistics = replace(self._statistics, num_cache_hits=self._statistics.num_cache_hits + 1)
            return compiled

    def _compiled(self, spec: GrammarSpec, key: str) -> _Compiled:
        """On the compiler's thread. Raises GrammarError."""
        compiled = self._cached(key)  # two callers may have waited for the same grammar
        if compiled is not None:
            return compiled
        start_s = self._now_s()
        try:
            compiled = self._compile(spec)
        except GrammarError:
            self._count(start_s, is_refused=True)
            raise
        self._count(start_s, is_refused=False)
        with self._lock:
            self._masters[key] = compiled
            while len(self._masters) > self._max_cached:
                self._masters.popitem(last=False)
        return compiled

    def _compile(self, spec: GrammarSpec) -> _Compiled:
        grammar = grammar_text(spec)
        master = llguidance.LLMatcher(self._vocabulary(), grammar, log_level=0, limits=parser_limits())
        if not master.is_error():
            # The first mask is the dearest, and some grammars that are too complex show it only here.
            row = np.zeros((self._num_rows + 31) // 32, dtype=np.int32)
            master.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if master.is_error():
            raise GrammarError(one_line(master.get_error()))
        is_measured = spec.kind in _JSON and len(spec.text) <= _MOST_MEASURED_CHARS
        return _Compiled(master, self._least(master) if is_measured else 0)

    def _least(self, master: llguidance.LLMatcher) -> int:
        assert self._ending is not None, "the grammar was compiled with the vocabulary"
        num_words = self._ending.tokens.num_words
        matcher = EndingMatcher(LLGuidanceMatcher(master.deep_copy(), num_words, self._eos_token_ids), self._ending, 0)
        return least_tokens(matcher, num_words, _MOST_LEAST_TOKENS)

    def _vocabulary(self) -> llguidance.LLTokenizer:
        """Raises GrammarError for a tokenizer whose tokens cannot be told as bytes."""
        if self._tokenizer is None:
            renamed = without_special_names(self._tokenizer_json)
            try:
                tokenizer = llguidance.LLTokenizer(renamed, n_vocab=self._num_rows, eos_token=sorted(self._eos_token_ids))
            except ValueError as error:
                raise GrammarError(f"this model's tokenizer cannot be used with grammars: {one_line(str(error))}") from error
            names = {token_id: name.encode() for token_id, name in special_token_names(self._tokenizer_json).items()}
            token_bytes = [names.get(token_id) or tokenizer.decode_bytes([token_id]) for token_id in range(self._num_rows)]
            self._ending = JsonEnding(TokenRows(token_bytes, self._num_rows, self._eos_token_ids))
            self._tokenizer = tokenizer
        return self._tokenizer

    def _marker(self, text: str) -> BeginMarker:
        """On the compiler's thread."""
        assert self._ending is not None, "the grammar was compiled before"
        marker = self._markers.get(text)
        if marker is None:
            if len(self._markers) >= _MAX_MARKERS:
                self._markers.clear()
            marker = self._markers[text] = BeginMarker(text, self._ending.tokens)
        return marker

    def _count(self, start_s: float, is_refused: bool) -> None:
        seconds = self._now_s() - start_s
        with self._lock:
            self._statistics = replace(
                self._statistics,
                num_compiles=self._statistics.num_compiles + 1,
                compile_s=self._statistics.compile_s + seconds,
                num_refused=self._statistics.num_refused + is_refused,
            )
