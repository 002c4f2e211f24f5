"""A fake graph capture for machines without CUDA: its replay runs the work again on the same memory."""

from __future__ import annotations

from collections.abc import Callable

from replicas.model.cuda_graphs import Replay


class EagerCapture:
    def capture(self, work: Callable[[], None]) -> Replay:
        work()
        return work
