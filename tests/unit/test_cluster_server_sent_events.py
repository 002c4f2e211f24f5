"""One event, as the standard wants it."""

from __future__ import annotations

from cluster.protocols.server_sent_events import json_event


def test_event_is_one_line_whatever_its_text_holds() -> None:
    assert json_event({"text": "a\nb\r\u2028"}) == b'data: {"text":"a\\nb\\r\xe2\x80\xa8"}\n\n'


def test_event_with_a_name_says_it_first() -> None:
    assert json_event({"a": 1}, "delta") == b'event: delta\ndata: {"a":1}\n\n'
