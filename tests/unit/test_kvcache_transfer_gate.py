"""Transfers on a rank that owns no blocks: open and closed as rank 0 says, and over when the last read or write is."""

import pytest

from kvcache.ownership import TransferRef
from kvcache.transfer_gate import TransferGate

REF = TransferRef(3, 7)


@pytest.fixture
def closed() -> list[TransferRef]:
    return []


@pytest.fixture
def gate(closed: list[TransferRef]) -> TransferGate:
    return TransferGate(30.0, closed.append)


def test_transfer_that_was_not_opened_here_lets_nothing_begin(gate: TransferGate, closed: list[TransferRef]) -> None:
    gate.open(TransferRef(2, 7))
    assert (gate.begin(REF), gate.renew(REF), gate.close(REF)) == (False, False, False)
    assert closed == []


def test_closing_cuts_the_link_first_and_is_over_after_the_last_read(gate: TransferGate, closed: list[TransferRef]) -> None:
    seen: list[str] = []
    gate.open(REF, lambda: seen.append(f"cut, {len(closed)} over"))
    with gate.using(REF) as is_open, gate.using(REF) as is_open_too:
        assert (is_open, is_open_too, gate.renew(REF)) == (True, True, True)
        assert gate.close(REF)
        assert (gate.begin(REF), gate.renew(REF), gate.close(REF)) == (False, False, False)
        assert closed == []
    assert (closed, seen) == ([REF], ["cut, 0 over"])
    assert not gate.close(REF)
    assert closed == [REF], "said once"


def test_transfer_that_nobody_uses_is_over_at_once(gate: TransferGate, closed: list[TransferRef]) -> None:
    seen: list[str] = []
    gate.open(REF, lambda: seen.append(f"cut, {len(closed)} over"))
    assert gate.close(REF)
    assert (closed, seen) == ([REF], ["cut, 0 over"])


def test_opening_twice_or_out_of_turn_is_our_bug(gate: TransferGate) -> None:
    gate.open(REF)
    for ref in (REF, TransferRef(2, 7), TransferRef(4, 6)):
        with pytest.raises(AssertionError, match="opened twice, or too late"):
            gate.open(ref)


def test_transfer_is_expected_until_it_or_a_later_one_was_opened(gate: TransferGate) -> None:
    assert gate.is_expected(REF)
    assert not gate.is_expected(TransferRef(-1, 7))
    gate.open(TransferRef(2, 7))
    assert gate.is_expected(REF)
    assert not gate.is_expected(TransferRef(3, 6)), "of an earlier life"
    gate.open(REF)
    gate.close(REF)
    assert not gate.is_expected(REF)
    assert not gate.is_expected(TransferRef(1, 7))
