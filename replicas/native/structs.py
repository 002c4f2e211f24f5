"""Whether the ctypes structures of this package are as large as the structs that the kernels were compiled with."""

from __future__ import annotations

import ctypes


class StructMismatch(TypeError):
    """A ctypes structure does not mirror its struct in the kernels, which would read past its end: a bug of this package. Not
    raised for fields of the right size in the wrong order."""


def check_structs(library: ctypes.CDLL, **mirrors: type[ctypes.Structure]) -> None:
    """`mirrors` are ctypes structures by the names of their structs in C. Raises StructMismatch naming the struct and both sizes."""
    size_of = library.manta_struct_size
    size_of.argtypes, size_of.restype = [ctypes.c_char_p], ctypes.c_int64
    for name, mirror in mirrors.items():
        compiled, mirrored = size_of(name.encode()), ctypes.sizeof(mirror)
        if compiled < 0:
            raise StructMismatch(f"the kernels export no struct {name}")
        if compiled != mirrored:
            raise StructMismatch(f"{name} has {compiled} bytes in the kernels and {mirrored} bytes in {mirror.__module__}")
