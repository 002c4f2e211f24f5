"""Checks that the ctypes structures of this package have the size of the structs that the kernels were compiled with."""

from __future__ import annotations

import ctypes


class StructMismatch(TypeError):
    """A ctypes structure and its struct in the kernels differ in size, so the kernels would read past its end: a bug of this package.
    Not raised for fields of the right size in the wrong order."""


def check_structs(library: ctypes.CDLL, **mirrors: type[ctypes.Structure]) -> None:
    """Checks `mirrors`: name of the C struct -> ctypes structure. Raises StructMismatch with the struct's name and both sizes."""
    size_of = library.manta_struct_size
    size_of.argtypes, size_of.restype = [ctypes.c_char_p], ctypes.c_int64
    for name, mirror in mirrors.items():
        compiled, mirrored = size_of(name.encode()), ctypes.sizeof(mirror)
        if compiled < 0:
            raise StructMismatch(f"the kernels export no struct {name}")
        if compiled != mirrored:
            raise StructMismatch(f"{name} has {compiled} bytes in the kernels and {mirrored} bytes in {mirror.__module__}")
