from __future__ import annotations

import gc
import weakref

from replicas.process.heap import freeze_heap


class _Node:
    """May be part of a cycle."""

    def __init__(self) -> None:
        self.other: _Node | None = None


def test_frozen_heap_holds_what_exists_and_no_garbage() -> None:
    kept, lost = _Node(), _Node()
    lost.other = lost
    ending = weakref.ref(lost)
    del lost
    freeze_heap()
    assert ending() is None
    assert not any(each is kept for each in gc.get_objects())
    later = _Node()
    assert any(each is later for each in gc.get_objects())


def test_heap_frozen_again_loses_what_became_garbage_since() -> None:
    cycle = _Node()
    cycle.other = cycle
    ending = weakref.ref(cycle)
    freeze_heap()
    del cycle
    gc.collect()
    assert ending() is not None, "out of reach of collections"
    freeze_heap()
    assert ending() is None
