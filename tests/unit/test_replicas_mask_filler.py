"""Masks as objects that hold up the thread that computes them."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import replicas.engine.mask_filler as mask_filler
from replicas.engine.mask_filler import MaskFiller
from tests.unit.hand_grammar import FakeMask, Gate


class HeldMask(FakeMask):
    """Its words take until the gate lets it through."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(lambda tokens: [1], 32)
        self._gate = gate

    def words(self) -> np.ndarray:
        self._gate.go_through()
        return super().words()


def plan_of(*masks: FakeMask | None) -> SimpleNamespace:
    """As much of a StepPlan as a MaskFiller reads."""
    return SimpleNamespace(chunks=[SimpleNamespace(samples=True, state=SimpleNamespace(sampling=SimpleNamespace(mask=m))) for m in masks])


def wait_ready(filler: MaskFiller, mask: FakeMask, gate: Gate | None = None) -> None:
    until_s = time.monotonic() + 30
    while not filler.is_ready(mask):
        assert time.monotonic() < until_s, "the mask was never computed"
        if gate is not None:
            gate.let_one_through()


@pytest.mark.parametrize(("processor_s", "is_slow"), [(1.0, True), (0.0, False)])
def test_late_mask_is_slow_if_a_processor_worked_on_it_and_those_behind_it_are_not(
    processor_s: float, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_filler, "LATE_AFTER_S", 0.001)
    gate, ended = Gate(), threading.Event()
    ticks = itertools.count()
    held, behind = HeldMask(gate), FakeMask(lambda tokens: [2], 32)
    filler = MaskFiller(ended.set, clock=lambda: processor_s * next(ticks))
    filler.start(plan_of(held, None, behind))  # type: ignore[arg-type]
    late = filler.wait()
    assert held in late
    wait_ready(filler, behind)  # on another thread
    assert not filler.is_ready(held)
    assert (held.is_slow, behind.is_slow) == (True, False)
    ended.clear()
    wait_ready(filler, held, gate)
    assert ended.wait(30)
    assert held.is_slow == is_slow
    assert filler.num_late == len(late)
    filler.close()


def test_mask_that_is_still_computed_is_not_given_to_a_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request lost its blocks, was computed again, and samples again."""
    monkeypatch.setattr(mask_filler, "LATE_AFTER_S", 0.001)
    gate = Gate()
    held = HeldMask(gate)
    filler = MaskFiller()
    for _ in range(3):
        filler.start(plan_of(held))  # type: ignore[arg-type]
        assert filler.wait() == {held}
    wait_ready(filler, held, gate)
    filler.close()
    assert filler.num_masks == 1


def test_step_without_grammars_waits_for_nothing() -> None:
    filler = MaskFiller()
    filler.start(plan_of(None, None))  # type: ignore[arg-type]
    assert filler.wait() == frozenset()
    filler.close()
    assert filler.num_masks == 0
