"""The header that names dropped keywords: safe for any schema, and never longer than a header may be."""

from __future__ import annotations

import pytest

from cluster.generation.notice_headers import UNSUPPORTED_HEADER, notice_headers
from cluster.generation.prepared_generation import PreparedGeneration
from replicas.sampling_params import SamplingParams


def header(*keywords: str) -> str | None:
    generation = PreparedGeneration(response_id="r", model="m", requests=(), params=SamplingParams(), dropped_keywords=keywords)
    return notice_headers(generation).get(UNSUPPORTED_HEADER)


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ((), None),
        (("#/items/uniqueItems", "#/oneOf (enforced as anyOf)"), "#/items/uniqueItems; #/oneOf (enforced as anyOf)"),
        (("#/properties/a;b\r\nSet-Cookie: x/not",), "#/properties/a%3Bb%0D%0ASet-Cookie: x/not"),
        (("#/properties/é/not",), "#/properties/%C3%A9/not"),
        (("x" * 2000,), "and 1 more"),
    ],
)
def test_header_is_one_line_of_ascii(keywords: tuple[str, ...], expected: str | None) -> None:
    assert header(*keywords) == expected


def test_header_of_many_keywords_is_cut_between_two_and_counts_the_rest() -> None:
    keywords = [f"#/properties/p{number}/not" for number in range(1500)]
    text = header(*keywords)
    assert text is not None
    *shown, rest = text.split("; ")
    assert shown == keywords[: len(shown)]
    assert rest == f"and {1500 - len(shown)} more"
    assert 900 < len(text) < 1020
