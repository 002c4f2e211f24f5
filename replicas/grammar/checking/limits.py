"""Bounds on what a client may ask to be compiled, and the checks that need no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.grammar.compiler import GrammarError
from replicas.grammar_spec import GrammarKind, GrammarSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Sizes beyond which a grammar is refused before anything is compiled."""

    max_text_bytes: int = 128 * 1024
    """Of a schema, a grammar, choices or tags."""
    max_regex_bytes: int = 8 * 1024
    """Of one pattern, also of one inside a schema."""
    max_repetitions: int = 10_000
    """Product of the counts of nested repetitions in one pattern: 1,000 for `(a{10}){100}`."""
    max_depth: int = 64
    """Nesting of JSON."""
    max_literal_bytes: int = 4 * 1024
    """Of one string that the answer must contain as it is (`const`, `enum`, names of properties, choices)."""
    max_joined_patterns: int = 8
    """Patterns that `allOf` and `$ref` join in one string: their product is one automaton."""
    max_marker_chars: int = 64
    """Of `begins_after`."""


def check_sizes(spec: GrammarSpec, limits: GrammarLimits) -> None:
    """Raises GrammarError for a text over the limits. Does not look into schemas (`schema_checks`)."""
    num_bytes = len(spec.text.encode("utf-8", "surrogatepass"))
    most = limits.max_regex_bytes if spec.kind is GrammarKind.REGEX else limits.max_text_bytes
    if num_bytes > most:
        raise GrammarError(f"the {label(spec.kind)} must be at most {most} bytes, got {num_bytes}")
    if "\0" in spec.text:
        raise GrammarError(f"the {label(spec.kind)} must not contain a NUL character")
    if any("\ud800" <= char <= "\udfff" for char in spec.text):
        raise GrammarError(f"the {label(spec.kind)} must be valid Unicode; it has a lone surrogate")
    if spec.begins_after is not None and len(spec.begins_after) > limits.max_marker_chars:
        raise GrammarError(f"begins_after must be at most {limits.max_marker_chars} characters, got {len(spec.begins_after)}")


def check_regex(pattern: str, limits: GrammarLimits, where: str) -> None:
    """Raises GrammarError for a pattern that is too long or repeats too much; `where` begins the message."""
    num_bytes = len(pattern.encode("utf-8", "surrogatepass"))
    if num_bytes > limits.max_regex_bytes:
        raise GrammarError(f"{where} must be at most {limits.max_regex_bytes} bytes, got {num_bytes}")
    num = most_repetitions(pattern)
    if num > limits.max_repetitions:
        raise GrammarError(f"{where} repeats a part {num} times; at most {limits.max_repetitions} are allowed")


def most_repetitions(pattern: str) -> int:
    """The largest product of the counts of nested repetitions: 1,000 for `(a{10}){100}`, 1 for a pattern without counts.

    `*` and `+` count as 1. Syntax errors are the compiler's business: an unbalanced parenthesis is ignored.
    """
    most = 1
    inner = [1]  # for each open group, and the whole: the largest product inside it
    last = 1  # the largest product inside the part before the cursor, to which a count applies
    position, size = 0, len(pattern)
    while position < size:
        char = pattern[position]
        if char == "\\":
            position += 2
            last = 1
            continue
        if char == "[":
            position = _class_end(pattern, position)
            last = 1
            continue
        if char == "{" and (count := _count(pattern, position)) is not None:
            times, position = count
            last *= max(1, times)
            inner[-1] = max(inner[-1], last)
            most = max(most, last)
            continue
        if char == "(":
            inner.append(1)
            last = 1
        elif char == ")" and len(inner) > 1:
            last = inner.pop()
            inner[-1] = max(inner[-1], last)
        elif char not in "*+?":
            last = 1
        position += 1
    return most


def _class_end(pattern: str, start: int) -> int:
    """Index behind a character class that begins at `start`. Classes nest in Rust's syntax."""
    depth, position = 0, start
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 1
        elif char == "[":
            depth += 1
            # A bracket that stands first is a literal: []a], [^]a].
            ahead = position + 2 if pattern[position + 1 : position + 2] == "^" else position + 1
            if pattern[ahead : ahead + 1] == "]":
                position = ahead
        elif char == "]":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return len(pattern)


def _count(pattern: str, start: int) -> tuple[int, int] | None:
    """The larger number of `{m}`, `{m,}` or `{m,n}` at `start`, and the index behind it. None: the brace is something else."""
    end = pattern.find("}", start)
    if end < 0:
        return None
    numbers = [number.strip() for number in pattern[start + 1 : end].split(",")]
    if len(numbers) > 2 or not any(numbers) or not all(number == "" or (number.isascii() and number.isdigit()) for number in numbers):
        return None
    # Eighteen digits are beyond every limit, and int() of a very long one raises.
    return max(int(number[:18] or "0") if len(number) <= 18 else 10**18 for number in numbers), end + 1


def label(kind: GrammarKind) -> str:
    """How messages for clients call the text."""
    return _LABELS[kind]


_LABELS = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.JSON_OBJECT: "JSON object",
    GrammarKind.REGEX: "regex",
    GrammarKind.CHOICE: "choice",
    GrammarKind.LARK: "grammar",
    GrammarKind.GBNF: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural tag",
}
