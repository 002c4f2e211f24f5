"""Which keywords of a schema cannot be enforced, where they stand, and the schema without them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replicas.grammar.compiler import GrammarError
from replicas.grammar.languages.json_schema import Path, pointer, subschemas

MAX_TRIALS = 200
"""Compiles for one reduction. Most take a millisecond; the process that checks bounds their time."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(?P<keys>[^\]]*)\]")
# What llguidance says -> keywords that can be the cause.
_CAUSES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"oneOf constraints are not supported"), ("oneOf",)),
    (re.compile(r"Unknown format: "), ("format",)),
    (re.compile(r"min/maxProperties only supported"), ("minProperties", "maxProperties")),
    (re.compile(r"patternProperty regexes .* are not disjoint|patternProperties"), ("patternProperties",)),
    (re.compile(r"regex parse error|lookarounds? not supported|look-around|in regex"), ("pattern", "patternProperties")),
    (re.compile(r"Resource '.*' is not present in a registry"), ("$ref",)),
)
_WORDS = {
    "oneOf": "oneOf cannot be enforced where more than one alternative may match; anyOf can",
    "minProperties": "the number of properties cannot be enforced beside optional ones",
    "maxProperties": "the number of properties cannot be enforced beside optional ones",
    "$ref": "references to other documents cannot be followed",
}


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One keyword at one place of a schema."""

    path: Path
    keyword: str

    def __str__(self) -> str:
        return pointer((*self.path, self.keyword))


class Reduction:
    """Finds the keywords of one schema that `refusal` (compiling it) rejects. Owns the number of compiles that are left for it."""

    def __init__(self, refusal: Callable[[dict[str, Any]], str | None], max_trials: int = MAX_TRIALS) -> None:
        self._refusal = refusal
        self._num_left = max_trials

    def explained(self, schema: dict[str, Any], reason: str) -> str:
        """The reason for which the compiler rejects `schema`, with the place of the first keyword that causes it, if that can be told."""
        culprits = self._culprits(schema, reason)
        if not culprits:
            return reason
        keyword = culprits[0].keyword
        what = f"{keyword} cannot be enforced" if _UNIMPLEMENTED.search(reason) is not None else _WORDS.get(keyword, reason)
        more = f" (and {len(culprits) - 1} more)" if len(culprits) > 1 else ""
        return f"{culprits[0]}: {what}{more}"

    def reduced(self, schema: dict[str, Any], reason: str) -> tuple[dict[str, Any], tuple[Occurrence, ...]]:
        """The schema without the keywords that cannot be enforced, and these keywords. `oneOf` becomes `anyOf`.

        Raises GrammarError if another fault remains: a schema that no value satisfies, a type that does not exist, a reference to nothing.
        """
        dropped: list[Occurrence] = []
        left: str | None = reason
        while left is not None:
            culprits = self._culprits(schema, left)
            if not culprits:
                raise GrammarError(left)
            schema = without(schema, culprits)
            dropped += culprits
            left = self._try(schema)
        return schema, tuple(dropped)

    def _culprits(self, schema: dict[str, Any], reason: str) -> list[Occurrence]:
        """Occurrences that alone, without the other candidates, bring the same refusal; if none does, all that the root reaches."""
        keywords = _keywords(reason)
        candidates = [
            Occurrence(path, keyword)
            for path, part in subschemas(schema, with_definitions=False)
            for keyword in part
            if keyword in keywords and _fits(part, keyword, reason)
        ]
        if len(candidates) < 2:
            return candidates
        others = without(schema, candidates)
        if self._num_left < len(candidates) + 2 or _is_about(self._try(others), keywords):
            return candidates  # too many to try, or something else in the schema also causes it
        culprits = []
        for candidate in candidates:
            alone = without(schema, [other for other in candidates if other != candidate])
            if _is_about(self._try(alone), keywords):
                culprits.append(candidate)
        return culprits or candidates

    def _try(self, schema: dict[str, Any]) -> str | None:
        if self._num_left <= 0:
            raise GrammarError("the schema is too complex: it asks for too much that cannot be enforced")
        self._num_left -= 1
        return self._refusal(schema)


def without(schema: dict[str, Any], occurrences: list[Occurrence]) -> dict[str, Any]:
    """A copy without these keywords."""
    reduced = copy.deepcopy(schema)
    # Places inside others first: a removed keyword may hold another one.
    for occurrence in sorted(occurrences, key=lambda found: len(found.path), reverse=True):
        part: Any = reduced
        for key in occurrence.path:
            part = part[key]
        value = part.pop(occurrence.keyword)
        if occurrence.keyword == "oneOf":
            if "anyOf" in part:
                part["allOf"] = [*part.get("allOf", ()), {"anyOf": value}]
            else:
                part["anyOf"] = value
    return reduced


def described(dropped: tuple[Occurrence, ...]) -> tuple[str, ...]:
    """Each dropped keyword with its path, for a header and a log line."""
    notes = {"oneOf": " (enforced as anyOf)"}
    return tuple(f"{occurrence}{notes.get(occurrence.keyword, '')}" for occurrence in dropped)


def _keywords(reason: str) -> frozenset[str]:
    found = _UNIMPLEMENTED.search(reason)
    if found is not None:
        return frozenset(re.findall(r'"([^"]+)"', found["keys"]))
    return frozenset(keyword for pattern, keywords in _CAUSES if pattern.search(reason) for keyword in keywords)


def _is_about(reason: str | None, keywords: frozenset[str]) -> bool:
    return reason is not None and not keywords.isdisjoint(_keywords(reason))


def _fits(part: dict[str, Any], keyword: str, reason: str) -> bool:
    """Excludes occurrences whose value the message does not name, where it names one."""
    if keyword == "format" and "Unknown format: " in reason:
        return str(part[keyword]) == reason.split("Unknown format: ", 1)[1].strip()
    if keyword == "$ref":
        return not str(part[keyword]).startswith("#")
    return True
