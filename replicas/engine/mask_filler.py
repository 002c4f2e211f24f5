"""Computes the masks of a step while the model runs."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from replicas.sampling.grammar_mask import SLOW_S
from replicas.sampling.sampling_state import LogitsMask
from replicas.scheduling.step_plan import StepPlan

logger = logging.getLogger(__name__)

LATE_AFTER_S = 0.02
"""How long a step whose model has run waits for masks."""
NUM_THREADS = 4
"""One for the masks of a step, and others for those that are late."""


class MaskFiller:
    """Owns threads, and the masks that are given to them. Nobody else may use a mask between `start` and the `wait` that does not return
    it; one that is late, not until `is_ready`."""

    def __init__(self, on_late: Callable[[], None] | None = None, clock: Callable[[], float] = time.thread_time) -> None:
        """`on_late` is called, by any thread, when a mask that was late is ready. `clock` counts processor time of the calling thread."""
        self._on_late = on_late
        self._clock = clock
        self._threads = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="masks")  # each starts with the first that needs it
        self._changed = threading.Condition()
        self._pending: set[LogitsMask] = set()  # not computed yet
        self._late: set[LogitsMask] = set()  # those of `_pending` that a `wait` returned
        self._suspects: set[LogitsMask] = set()  # those of `_late` that are slow unless the time of the processor says otherwise
        self._planned: list[LogitsMask] = []  # of this step
        self._awaited: list[LogitsMask] = []  # those that the step waits for
        self._begun: deque[LogitsMask] = deque()  # those that the step's thread has not come to
        self.num_masks = 0
        self.mask_s = 0.0
        """Processor seconds of these threads, beside the model."""
        self.num_late = 0
        """Masks that a step did not wait for."""

    def start(self, plan: StepPlan) -> None:
        """Begins to compute the mask of each chunk that samples. Masks behind drafts are left to the sampler."""
        found = (chunk.state.sampling.mask for chunk in plan.chunks if chunk.samples)
        self._planned = [mask for mask in found if mask is not None]
        if not self._planned:
            return
        self._awaited = [mask for mask in self._planned if not mask.is_slow]
        with self._changed:
            # One that is pending belongs to a request that lost its blocks meanwhile, and is back.
            new = [mask for mask in self._planned if mask not in self._pending]
            self._pending.update(new)
        self._begun = deque(mask for mask in new if not mask.is_slow)
        for masks in (self._begun, deque(mask for mask in new if mask.is_slow)):
            if masks:
                self._threads.submit(self._fill, masks)

    def wait(self) -> frozenset[LogitsMask]:
        """Returns when all masks are computed, or those that are missing have had their time: these are late. Slow ones get no time."""
        if not self._planned:
            return frozenset()
        with self._changed:
            self._changed.wait_for(lambda: self._pending.isdisjoint(self._awaited), LATE_AFTER_S)
            late = self._pending.intersection(self._planned)
            self._late |= late
            self.num_late += len(late)
            behind = _taken(self._begun) if late else None
            for mask in late.difference(behind or ()):
                if not mask.is_slow:
                    mask.is_slow = True
                    self._suspects.add(mask)
        if behind:
            self._threads.submit(self._fill, behind)
        return frozenset(late)

    def is_ready(self, mask: LogitsMask) -> bool:
        """Whether a mask that was late is computed."""
        with self._changed:
            return mask not in self._pending

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _fill(self, masks: deque[LogitsMask]) -> None:
        while masks:
            try:
                mask = masks.popleft()
            except IndexError:  # `wait` took it
                return
            start_s = self._clock()
            try:
                mask.words()
            except Exception:  # the sampler meets it again
                logger.exception("a mask could not be computed")
            seconds = self._clock() - start_s
            with self._changed:
                if mask in self._suspects:
                    self._suspects.discard(mask)
                    mask.is_slow = seconds >= SLOW_S  # or else the thread had to wait for a core
                self.num_masks += 1
                self.mask_s += seconds
                self._pending.discard(mask)
                was_late = mask in self._late
                self._late.discard(mask)
                if not masks:
                    self._changed.notify_all()
            if was_late and self._on_late is not None:
                self._on_late()


def _taken(masks: deque[LogitsMask]) -> deque[LogitsMask]:
    """All that another thread does not take first."""
    taken: deque[LogitsMask] = deque()
    while True:
        try:
            taken.append(masks.popleft())
        except IndexError:
            return taken
