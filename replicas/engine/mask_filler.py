"""Computes the masks of a step while the model runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from replicas.sampling.sampling_state import LogitsMask
from replicas.scheduling.step_plan import StepPlan


class MaskFiller:
    """Owns a thread. Between `start` and `wait` nobody else may use the masks of the plan."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")  # starts with the first mask
        self._job: Future[None] | None = None
        self.num_masks = 0
        self.mask_s = 0.0
        """Seconds spent on them in this thread, beside the model."""

    def start(self, plan: StepPlan) -> None:
        """Begins to compute the mask of each chunk that samples. Masks behind drafts are left to the sampler."""
        found = (chunk.state.sampling.mask for chunk in plan.chunks if chunk.samples)
        masks = [mask for mask in found if mask is not None]
        if masks:
            self._job = self._thread.submit(self._fill, masks)

    def wait(self) -> None:
        """Returns when all masks are computed."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _fill(self, masks: Sequence[LogitsMask]) -> None:
        start_s = self._clock()
        for mask in masks:
            mask.words()
        self.num_masks += len(masks)
        self.mask_s += self._clock() - start_s
