"""Grammars over token ids, small enough to be followed by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from replicas.grammar.compiler import GrammarError, GrammarStatistics
from replicas.grammar_spec import GrammarKind, GrammarSpec

Automaton = Mapping[int, Mapping[int, int]]
"""state -> token id -> next state. The text begins in state 0."""


def packed(token_ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """One bit a token, as masks have them."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class FakeMask:
    """A LogitsMask that allows what the function of the tokens so far says, and records these."""

    must_end = False
    is_slow = False
    error: str | None = None

    def __init__(self, allowed: Callable[[Sequence[int]], Iterable[int]], vocab_size: int) -> None:
        self.tokens: list[int] = []
        self._allowed, self._vocab_size = allowed, vocab_size

    def advance(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def words(self) -> npt.NDArray[np.int32]:
        return packed(self._allowed(self.tokens), self._vocab_size)

    def forced_tokens(self) -> Sequence[int]:
        return ()


class AutomatonMatcher:
    """A GrammarMatcher. `breaks_at` is a number of tokens after which it can go no further; with `forces` off it never names forced
    tokens, though its mask leaves no other."""

    def __init__(
        self, automaton: Automaton, finals: frozenset[int], eos: int, *, forces: bool = True, breaks_at: int | None = None
    ) -> None:
        self._automaton, self._finals, self._eos, self._forces, self._breaks_at = automaton, finals, eos, forces, breaks_at
        self._states = [0]
        self.error: str | None = None

    def allowed(self) -> list[int]:
        return [*self._automaton.get(self._states[-1], {}), *([self._eos] if self.may_end else [])]

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        row[:] = packed(self.allowed(), 32 * len(row))

    def accept(self, token_id: int) -> bool:
        assert self.error is None, "nothing is accepted after an error"
        if token_id not in self.allowed():
            self.error = f"token {token_id} is not allowed"
            return False
        following = self._automaton.get(self._states[-1], {})
        self._states.append(following.get(token_id, -1))
        if self._breaks_at is not None and self.num_tokens >= self._breaks_at:
            self.error = f"the grammar became too complex after {self.num_tokens} tokens"
        return True

    def accept_all(self, token_ids: Sequence[int]) -> int:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > self.num_tokens:
            raise ValueError("more than were accepted")
        del self._states[len(self._states) - num_tokens :]

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        state = self._states[-1]
        while self._forces and state not in self._finals and len(following := self._automaton.get(state, {})) == 1:
            ((token_id, state),) = following.items()
            forced.append(token_id)
        return forced

    @property
    def num_tokens(self) -> int:
        return len(self._states) - 1

    @property
    def may_end(self) -> bool:
        return self._states[-1] in self._finals

    @property
    def must_end(self) -> bool:
        return self.may_end and not self._automaton.get(self._states[-1])


class HandCompiler:
    """A GrammarCompiler of grammars by name: `texts` maps the text of a spec to what makes its matcher. A spec of any other text is
    refused. While `gate` is cleared, a spec whose text begins with "slow" takes for ever."""

    def __init__(self, texts: Mapping[str, Callable[[], AutomatonMatcher]]) -> None:
        self._texts = texts
        self.gate = threading.Event()
        self.gate.set()
        self.max_tokens: list[int | None] = []

    def matcher(self, spec: GrammarSpec, *, max_tokens: int | None = None) -> AutomatonMatcher:
        if spec.text.startswith("slow"):
            assert self.gate.wait(30)
        if spec.text not in self._texts:
            raise GrammarError(f"no grammar is called {spec.text!r}")
        self.max_tokens.append(max_tokens)
        return self._texts[spec.text]()

    def statistics(self) -> GrammarStatistics:
        return GrammarStatistics(num_compiles=len(self.max_tokens))


def grammar(name: str) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.LARK, text=name)


class Gate:
    """Holds up threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._opened = threading.Semaphore(0)

    def go_through(self) -> None:
        with self._lock:
            self._num_waiting += 1
        assert self._opened.acquire(timeout=30), "the gate stayed closed"

    def let_one_through(self) -> None:
        """If one waits; nobody who comes later profits from it."""
        with self._lock:
            if self._num_waiting:
                self._num_waiting -= 1
                self._opened.release()


class GatedMatcher(AutomatonMatcher):
    """An AutomatonMatcher whose masks after the first `num_quick` tokens take until `gate` lets one through, each in turn."""

    def __init__(
        self, automaton: Automaton, finals: frozenset[int], eos: int, gate: Gate, *, num_quick: int = 0, forces: bool = True
    ) -> None:
        super().__init__(automaton, finals, eos, forces=forces)
        self._gate, self._num_quick = gate, num_quick

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        states = list(self._states)
        if self.num_tokens >= self._num_quick:
            self._gate.go_through()
        assert self._states == states, "the matcher was used while its mask was computed"
        super().fill(row)
