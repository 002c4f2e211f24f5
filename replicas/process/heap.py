"""Excludes objects that live as long as the process from garbage collection."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Excludes all current objects from later garbage collections. Collects once itself, for a tenth to half a second.

    Modules, a model or a tokenizer are hundreds of thousands of objects. A full collection visits them all while every thread of
    the process waits, including the event loop and so every stream. A second call first collects the objects excluded before.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
