"""Counts the objects that an object keeps alive, so that tests of memory need no private attributes."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)
"""Parts of the program, and the doors to all of it."""


def reachable(root: object) -> list[object]:
    """Every object that `root` refers to, directly or not, each once; code and classes are left out."""
    found: dict[int, object] = {id(root): root}
    new = [root]
    while new:
        referents = gc.get_referents(*new)
        new = []
        for one in referents:
            if id(one) not in found and not isinstance(one, _SHARED):
                found[id(one)] = one
                new.append(one)
    return list(found.values())


def num_reachable(root: object, kind: type) -> int:
    return sum(isinstance(one, kind) for one in reachable(root))
