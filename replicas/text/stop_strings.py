"""Finds the first of several stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStringMatcher:
    """Aho-Corasick automaton (CACM 18(6), 1975) over the stop strings, and the text that it holds back.

    The match that ends first wins; if several end together, the longest. Text is held back only while it is a proper
    prefix of some stop string, so joined outputs are the text up to the match. Time is linear in the text, whatever
    the number of stop strings.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        self._include = include_in_output
        self._children: list[dict[str, int]] = [{}]  # node -> character -> node; node 0 is the empty string
        self._suffix = [0]  # node -> the node of its longest proper suffix
        self._match: list[str | None] = [None]  # node -> the longest stop string that ends here
        self._hold = [0]  # node -> length of the longest suffix that can still grow into a stop string
        for string in stop:
            self._insert(string)
        self._link()
        self._node = 0
        self._held = ""

    def _insert(self, string: str) -> None:
        node = 0
        for char in string:
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._suffix.append(0)
                self._match.append(None)
                self._hold.append(self._hold[node] + 1)
            node = self._children[node][char]
        self._match[node] = string

    def _link(self) -> None:
        """Breadth first, so that a node's suffix, which is shorter, is complete before it."""
        queue = deque([(0, char, node) for char, node in self._children[0].items()])
        while queue:
            parent, char, node = queue.popleft()
            self._suffix[node] = self._step(self._suffix[parent], char) if parent else 0
            if self._match[node] is None:
                self._match[node] = self._match[self._suffix[node]]
            if not self._children[node]:  # a complete stop string that is no prefix of a longer one
                self._hold[node] = self._hold[self._suffix[node]]
            queue.extend((node, next_char, child) for next_char, child in self._children[node].items())

    def _step(self, node: int, char: str) -> int:
        while char not in self._children[node]:
            if node == 0:
                return 0
            node = self._suffix[node]
        return self._children[node][char]

    def push(self, text: str, ignore_matches: bool = False) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string that ended it, if any; nothing may be pushed after a match.

        With `ignore_matches` (before `min_tokens`) a stop string that ends within `text` is ordinary text; one that only
        begins there can still match later.
        """
        if len(self._children) == 1:
            return text, None
        node = self._node
        for position, char in enumerate(text):
            node = self._step(node, char)
            stop = self._match[node]
            if stop is not None and not ignore_matches:
                seen = self._held + text[: position + 1]
                self._held, self._node = "", 0
                return seen if self._include else seen[: len(seen) - len(stop)], stop
        self._node = node
        seen = self._held + text
        num_safe = len(seen) - self._hold[node]
        self._held = seen[num_safe:]
        return seen[:num_safe], None

    def flush(self) -> str:
        """The text held back. Ends the text, so that it cannot become a stop string any more."""
        held, self._held, self._node = self._held, "", 0
        return held
