"""Dates and times, judged by Python's own calendar."""

from __future__ import annotations

import datetime as dt
import json
import re
from pathlib import Path

import pytest

from replicas.grammar.languages.schema_formats import PATTERNS, with_exact_formats
from replicas.grammar_spec import GrammarKind, GrammarSpec
from tests.grammar_masks import default_backend, default_compiler, token_ids


def is_date(text: str) -> bool:
    try:
        dt.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_date_is_every_day_of_the_calendar_and_no_other() -> None:
    years = [1, 4, 99, 100, 400, 999, 1000, 1899, 1900, 1904, 1996, 1999, 2000, 2023, 2024, 2100, 2400, 9996, 9999]
    texts = [f"{year:04}-{month:02}-{day:02}" for year in years for month in range(14) for day in range(33)]
    assert [text for text in texts if (re.fullmatch(PATTERNS["date"], text) is not None) != is_date(text)] == []
    leap = [year for year in range(10_000) if re.fullmatch(PATTERNS["date"], f"{year:04}-02-29")]
    assert leap == [year for year in range(1, 10_000) if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)]


@pytest.mark.parametrize("text", ["00:00:00Z", "23:59:59z", "12:30:45.123456+05:30", "01:02:03.5-23:59"])
def test_time_that_can_be_read_is_one(text: str) -> None:
    dt.time.fromisoformat(text.replace("z", "Z"))
    assert re.fullmatch(PATTERNS["time"], text)
    assert re.fullmatch(PATTERNS["date-time"], f"2024-02-29T{text}")


@pytest.mark.parametrize("text", ["24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00", "12:00Z", "12:00:00+24:00", "12:00:00.Z", "1:00:00Z"])
def test_time_that_no_library_reads_is_none(text: str) -> None:
    assert not re.fullmatch(PATTERNS["time"], text)
    assert not re.fullmatch(PATTERNS["date-time"], f"2024-02-29T{text}")


@pytest.mark.parametrize(
    ("schema", "exact"),
    [
        ({"type": "string", "format": "date"}, {"type": "string", "pattern": PATTERNS["date"]}),
        ({"format": "time", "pattern": "Z$"}, {"pattern": "Z$", "allOf": [{"pattern": PATTERNS["time"]}]}),
        (
            {"$ref": "#/components/day", "components": {"day": {"format": "date", "pattern": "^2", "allOf": [{}]}}},
            {"$ref": "#/components/day", "components": {"day": {"pattern": "^2", "allOf": [{}, {"pattern": PATTERNS["date"]}]}}},
        ),
        ({"properties": {"format": {"const": "date"}}, "enum": ["date"]}, {"properties": {"format": {"const": "date"}}, "enum": ["date"]}),
        ({"format": "email"}, {"format": "email"}),
    ],
)
def test_formats_become_patterns_and_nothing_else_changes(schema: dict[str, object], exact: dict[str, object]) -> None:
    before = json.dumps(schema)
    assert with_exact_formats(schema) == exact
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text='{"type": "string", "format": "date", "maxLength": 10}'),
        GrammarSpec(kind=GrammarKind.LARK, text='start: %json {"type": "string", "format": "date"}'),
    ],
)
def test_answer_has_no_29_february_in_other_years(spec: GrammarSpec, default_model_dir: Path) -> None:
    backend, compiler = default_backend(default_model_dir), default_compiler(default_model_dir)
    for text, is_right in (('"2024-02-29"', True), ('"2023-02-29"', False), ('"1900-02-29"', False), ('"2023-02-28"', True)):
        matcher = compiler.matcher(spec)
        ids = token_ids(backend, text)
        assert (matcher.accept_all(ids) == len(ids) and matcher.must_end) == is_right
