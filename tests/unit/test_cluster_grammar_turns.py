"""Who is checked next; every expected order is worked out by hand."""

from __future__ import annotations

import random

import pytest

from cluster.grammar.check_turns import CheckTurns, Turn


def added(turns: CheckTurns, *tenants: str) -> list[Turn]:
    made = [Turn(tenant) for tenant in tenants]
    assert all(turns.try_add(turn) for turn in made)
    return made


def test_turns_come_in_the_order_of_arrival_while_there_are_places() -> None:
    turns = CheckTurns(3, 10)
    a, b, c, d = added(turns, "a", "b", "c", "d")
    assert turns.begin() == [a, b, c]
    turns.end(b)
    assert turns.begin() == [d]
    assert (turns.num_running, turns.num_waiting) == (3, 0)


def test_tenant_leaves_a_place_to_others() -> None:
    turns = CheckTurns(3, 10)
    first, second, _third, other = added(turns, "a", "a", "a", "b")
    assert turns.begin() == [first, second, other]


def test_tenant_has_one_slow_check_and_one_place_is_never_slow() -> None:
    turns = CheckTurns(3, 10)
    a, a2, b = added(turns, "a", "a", "b")
    turns.begin()
    assert turns.try_go_on(a)
    assert not turns.try_go_on(a2)
    assert turns.try_go_on(b)
    turns.end(a2)
    (c,) = added(turns, "c")
    assert turns.begin() == [c]
    assert not turns.try_go_on(c)
    turns.end(a)
    assert turns.try_go_on(c)


def test_too_many_waiting_are_turned_away() -> None:
    turns = CheckTurns(2, 2)
    added(turns, "a", "b")
    assert not turns.try_add(Turn("c"))
    turns.begin()
    assert turns.try_add(Turn("c"))


def test_turn_that_gives_up_waiting_is_forgotten() -> None:
    turns = CheckTurns(2, 10)
    _a, _b, c, d = added(turns, "a", "b", "c", "d")
    a, b = turns.begin()
    turns.end(c)
    turns.end(a)
    assert turns.begin() == [d]
    for turn in (b, d, c):
        turns.end(turn)
    assert (turns.num_running, turns.num_waiting) == (0, 0)


def test_one_place_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        CheckTurns(1, 10)


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_events_shares_hold_and_nobody_is_lost(seed: int) -> None:
    draw = random.Random(seed)
    turns = CheckTurns(3, 50)
    live: list[Turn] = []
    running: list[Turn] = []
    for _ in range(300):
        event = draw.random()
        if event < 0.5:
            turn = Turn(draw.choice("abc"))
            if turns.try_add(turn):
                live.append(turn)
        elif event < 0.8 and live:
            turn = live.pop(draw.randrange(len(live)))
            turns.end(turn)
            running = [other for other in running if other is not turn]
        elif running:
            turns.try_go_on(draw.choice(running))
        running += turns.begin()
        assert len(running) == turns.num_running <= 3
        assert len(live) == turns.num_running + turns.num_waiting
        assert all(sum(turn.tenant == tenant for turn in running) <= 2 for tenant in "abc")
        slow = [turn.tenant for turn in running if turn.is_slow]
        assert len(slow) == len(set(slow)) <= 2
        waiting_tenants = {turn.tenant for turn in live} - {turn.tenant for turn in running}
        assert not waiting_tenants or len(running) == 3, "a tenant without any check waits beside a free place"
