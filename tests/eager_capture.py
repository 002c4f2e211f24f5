"""A recording of nothing: the work itself, run again on the same memory. For machines without CUDA."""

from __future__ import annotations

from collections.abc import Callable

from replicas.model.cuda_graphs import Replay


class EagerCapture:
    def capture(self, work: Callable[[], None]) -> Replay:
        work()
        return work
