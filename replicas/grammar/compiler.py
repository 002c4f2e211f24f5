"""What makes matchers from grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from replicas.grammar.matcher import GrammarMatcher
from replicas.grammar_spec import GrammarSpec


class GrammarError(ValueError):
    """The grammar cannot be enforced, or is beyond the limits; the message is one line for the client.

    Not raised for an answer that leaves its grammar: that is `GrammarMatcher.error`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStatistics:
    """Counts since the compiler was made."""

    num_compiles: int = 0
    """Grammars compiled, refused ones included."""
    compile_s: float = 0.0
    """Seconds spent in them."""
    num_cache_hits: int = 0
    """Matchers made of a grammar that was compiled before."""
    num_refused: int = 0


class GrammarCompiler(Protocol):
    """Owns the compiled grammars of one vocabulary, a bounded number of them, by `GrammarSpec.key`. Safe to call from several threads."""

    def matcher(self, spec: GrammarSpec, *, max_tokens: int | None = None) -> GrammarMatcher:
        """A matcher at the beginning of an answer of at most `max_tokens` tokens (None: no bound is known); near that bound it allows
        only what brings the answer to its end, where the grammar leaves a choice.

        Takes up to a second for a grammar that is not cached, so never call it on the engine's thread or an event loop.
        Raises GrammarError.
        """
        ...

    def statistics(self) -> GrammarStatistics: ...
