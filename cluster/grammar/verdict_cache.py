"""Verdicts on grammars that were checked before."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from replicas.grammar_spec import GrammarKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check found. Text and kind of the grammar only where the check changed them."""

    error: str | None = None
    kind: GrammarKind | None = None
    text: str | None = None
    dropped: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory."""
        return 200 + sum(len(text) for text in (self.error or "", self.text or "", *self.dropped))


class VerdictCache:
    """Owns the verdicts that were used last, by a key of the grammar and of how it was checked; bounded in number and bytes."""

    def __init__(self, max_verdicts: int = 4_096, max_bytes: int = 16 << 20) -> None:
        self._max_verdicts = max_verdicts
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()

    def get(self, key: str) -> Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
        return verdict

    def put(self, key: str, verdict: Verdict) -> None:
        """A verdict is final: the key must be new."""
        self._verdicts[key] = verdict
        self._num_bytes += verdict.num_bytes
        while len(self._verdicts) > self._max_verdicts or self._num_bytes > self._max_bytes:
            _, oldest = self._verdicts.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def __len__(self) -> int:
        return len(self._verdicts)
