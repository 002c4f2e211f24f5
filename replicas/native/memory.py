"""Memory in huge pages, for weights, which every step reads from end to end."""

from __future__ import annotations

import contextlib
import mmap

import torch

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
"""A cache line, so that no vector load crosses two."""


class HugePageMemory:
    """Owns private anonymous mappings and hands out pieces of them; a mapping lives as long as a tensor in it.

    Hardware prefetch stops at the end of a page, and a page of 2 MiB takes one TLB entry instead of 512. Where the operating system
    gives no huge pages this is ordinary memory.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of the tensor in this memory."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes == 0:
            return tensor.contiguous()
        if self._used_bytes + num_bytes > self._chunk.numel():
            self._chunk, self._used_bytes = _map(max(_CHUNK_BYTES, num_bytes)), 0
        piece = self._chunk[self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _map(num_bytes: int) -> torch.Tensor:
    """A mapping; its pages take memory only once they are written."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # an operating system built without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
