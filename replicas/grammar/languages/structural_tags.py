"""Free text with tags in it: each trigger begins one, and what stands in the tag follows a schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from replicas.grammar.compiler import GrammarError

MAX_TAGS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTag:
    """`begin`, then JSON of `schema`, then `end`. The text is free until it contains `trigger`, with which `begin` starts."""

    trigger: str
    begin: str
    schema: dict[str, Any]
    end: str


def parse_tags(text: str) -> tuple[StructuralTag, ...]:
    """Reads `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, the form that vLLM and SGLang take.

    Raises GrammarError, one line that names the field.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError("structural_tag must be JSON") from error
    if not isinstance(body, dict):
        raise GrammarError("structural_tag must be an object with `structures` and `triggers`")
    triggers = body.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise GrammarError("structural_tag.triggers must be a list of non-empty strings")
    structures = body.get("structures")
    if not isinstance(structures, list) or not 1 <= len(structures) <= MAX_TAGS:
        raise GrammarError(f"structural_tag.structures must be a list of 1 to {MAX_TAGS} objects")
    return tuple(_tag(structure, triggers, f"structural_tag.structures[{index}]") for index, structure in enumerate(structures))


def _tag(structure: Any, triggers: list[str], where: str) -> StructuralTag:
    if not isinstance(structure, dict):
        raise GrammarError(f"{where} must be an object with `begin`, `schema` and `end`")
    begin, schema, end = structure.get("begin"), structure.get("schema"), structure.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(f"{where}: begin and end must be strings")
    if not isinstance(schema, dict):
        raise GrammarError(f"{where}.schema must be an object")
    fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
    if not fitting:
        raise GrammarError(f"{where}.begin must start with one of the triggers")
    # The free text ends at the first trigger that it contains, which is the shortest of those that begin alike.
    return StructuralTag(trigger=min(fitting, key=len), begin=begin, schema=schema, end=end)


def lark_of_tags(tags: tuple[StructuralTag, ...]) -> str:
    """A grammar of free text with any number of these tags. Tags that share a trigger are alternatives behind it."""
    groups: dict[str, list[int]] = {}  # trigger -> numbers of its tags
    for number, tag in enumerate(tags):
        groups.setdefault(tag.trigger, []).append(number)
    names = [f"group_{index}" for index in range(len(groups))]
    lines = [f"start: ({' | '.join(names)})* FREE", "FREE: /(.|\\n)*/"]
    for name, (trigger, numbers) in zip(names, groups.items(), strict=True):
        lines.append(f"{name}: {name}_trigger ({' | '.join(f'tag_{number}' for number in numbers)})")
        lines.append(f"{name}_trigger[lazy]: FREE {_literal(trigger)}")
        for number in numbers:
            tag = tags[number]
            begin = _literal(tag.begin[len(trigger) :])
            lines.append(f"tag_{number}: {begin} %json {json.dumps(tag.schema)} {_literal(tag.end)}")
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    """Lark knows JSON's escapes. An empty literal is nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""
