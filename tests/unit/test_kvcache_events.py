from __future__ import annotations

import pytest

from kvcache.events import BlockEvicted, KVEvent, KVEventLog


@pytest.mark.parametrize(("num_appended", "oldest"), [(0, 0), (3, 0), (8, 0), (21, 13)])
def test_since_gives_all_later_events_in_order_or_none_when_one_is_gone(num_appended: int, oldest: int) -> None:
    log = KVEventLog(capacity=8)
    events: list[KVEvent] = [BlockEvicted(bytes([number])) for number in range(num_appended)]
    for event in events:
        log.append(event)
    assert log.next_number == num_appended
    for number in range(num_appended + 3):
        expected = tuple(events[number:]) if oldest <= number <= num_appended else None
        assert log.since(number) == expected
