"""One event, as the standard wants it."""

from __future__ import annotations

import json

import pytest

from cluster.protocols.server_sent_events import json_event


@pytest.mark.parametrize("separator", ["\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
def test_event_is_one_line_by_any_rule(separator: str) -> None:
    """Those are all line boundaries of Python's `str.splitlines`, which takes more than any other splitter."""
    assert len(f"a{separator}b".splitlines()) == 2
    event = json_event({"text": f"a{separator}b"}).decode()
    assert event.endswith("\n\n")
    (line,) = event.removesuffix("\n\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": f"a{separator}b"}


def test_event_keeps_other_characters_as_they_are() -> None:
    assert json_event({"text": "é中🙂\u200b"}) == 'data: {"text":"é中🙂\u200b"}\n\n'.encode()


def test_event_with_a_name_says_it_first() -> None:
    assert json_event({"a": 1}, "delta") == b'event: delta\ndata: {"a":1}\n\n'
