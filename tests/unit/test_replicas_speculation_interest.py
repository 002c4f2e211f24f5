"""When steps keep hidden states: while drafts are in use, and now and then for a trial."""

from __future__ import annotations

from replicas.speculation.drafting.interest import RESTING_STEPS, TRIALS, Interest


def share_kept(interest: Interest, num_steps: int, wish_every: int) -> tuple[float, int]:
    """Share of steps that keep hidden states, and how many wishes came behind such a step."""
    num_kept = num_served = 0
    is_kept = False
    for step in range(num_steps):
        if step % wish_every == 0:
            interest.note_wish()
            num_served += is_kept
        is_kept = interest.note_step()
        num_kept += is_kept
    return num_kept / num_steps, num_served


def test_everything_is_kept_while_drafts_are_in_use() -> None:
    assert share_kept(Interest(), 500, 1) == (1.0, 499)
    assert share_kept(Interest(), 500, 2)[0] == 1.0


def test_nothing_is_kept_without_wishes() -> None:
    interest = Interest()
    assert [interest.note_step() for _ in range(RESTING_STEPS + 100)].count(True) == RESTING_STEPS


def test_trials_are_served_now_and_then_and_keep_little() -> None:
    for every in (20, 60):
        kept, num_served = share_kept(Interest(), every * TRIALS * 10, every)
        assert kept < 0.2
        assert 10 <= num_served <= 12


def test_use_after_trials_wakes_at_once() -> None:
    interest = Interest()
    share_kept(interest, 3 * 40, 40)
    assert not interest.note_step()
    interest.note_wish()
    interest.note_step()
    interest.note_wish()
    assert all(interest.note_step() for _ in range(RESTING_STEPS))
