from __future__ import annotations

import gc
import weakref

from cluster.gateway import load_tokenizer
from replicas.default_model import prepare_default_model
from replicas.heap import freeze_heap


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


def test_tokenizer_of_a_gateway_is_out_of_collections() -> None:
    tokenizer = load_tokenizer(str(prepare_default_model()))
    assert tokenizer.decode(tokenizer.encode("out of the way")) == "out of the way"
    assert not any(each is tokenizer for each in gc.get_objects())
