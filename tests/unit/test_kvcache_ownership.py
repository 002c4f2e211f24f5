"""Transfers beside requests: what they may touch, and when what they held comes back."""

import pytest

from kvcache.block_pool import BlockPool
from kvcache.ownership import BlockState, Direction, KVOwnership, TransferRef


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ownership(clock: Clock) -> KVOwnership:
    return KVOwnership(pool=BlockPool(4, 2), epoch=7, lease_s=10.0, clock=clock)


def _held(ownership: KVOwnership, num_blocks: int = 2) -> list[int]:
    block_ids = ownership.pool.try_allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def test_block_passes_through_free_held_leased_and_back(ownership: KVOwnership) -> None:
    assert ownership.state(0) is BlockState.FREE
    blocks = _held(ownership)
    assert {ownership.state(b) for b in blocks} == {BlockState.HELD}
    ref = ownership.open(Direction.OUT, blocks)
    ownership.pool.release(blocks)
    assert {ownership.state(b) for b in blocks} == {BlockState.LEASED}
    assert (ownership.pool.num_free, ownership.num_leases) == (2, 1)
    assert ownership.close(ref)
    assert ownership.num_leases == 1, "closed, but not let go"
    assert ownership.collect() == [ref]
    assert ownership.num_leases == 0
    assert {ownership.state(b) for b in blocks} == {BlockState.FREE}
    ownership.check()
    ownership.pool.check_holders([])


def test_block_of_a_request_stays_held_after_its_transfer(ownership: KVOwnership) -> None:
    blocks = _held(ownership)
    ref = ownership.open(Direction.IN, blocks)
    assert ownership.state(blocks[0]) is BlockState.LOADING
    assert ownership.num_leases == 0
    assert ownership.close(ref)
    ownership.collect()
    assert ownership.state(blocks[0]) is BlockState.HELD
    ownership.pool.check_holders([blocks])


def test_expired_lease_is_cut_first_and_freed_after_the_last_read(ownership: KVOwnership, clock: Clock) -> None:
    cut = []
    blocks = _held(ownership)
    ref = ownership.open(Direction.OUT, blocks, on_closing=lambda: cut.append(ownership.pool.num_free))
    ownership.pool.release(blocks)
    assert ownership.begin(ref)
    clock.now_s += 10.0
    assert ownership.collect() == []
    assert cut == [2], "the link is cut while the blocks are still taken"
    assert not ownership.begin(ref)
    ownership.end(ref)
    assert ownership.collect() == [ref]
    assert ownership.pool.num_free == 4
    assert ownership.counters.num_expired == 1


def test_renewed_lease_lives_one_lease_longer(ownership: KVOwnership, clock: Clock) -> None:
    ref = ownership.open(Direction.OUT, _held(ownership))
    clock.now_s += 9.0
    assert ownership.renew(ref)
    clock.now_s += 9.0
    assert ownership.collect() == []
    assert ownership.is_open(ref)
    clock.now_s += 1.0
    assert not ownership.renew(ref), "past its deadline nothing brings it back, even before it is collected"
    assert ownership.collect() == [ref]


def test_message_of_another_epoch_or_twice_changes_nothing(ownership: KVOwnership) -> None:
    ref = ownership.open(Direction.OUT, _held(ownership))
    other = TransferRef(ref.number, ref.epoch - 1)
    assert (ownership.begin(other), ownership.renew(other), ownership.close(other)) == (False, False, False)
    assert ownership.close(ref)
    assert not ownership.close(ref)
    ownership.collect()
    assert not ownership.close(ref)


def test_block_may_be_leased_twice_but_loads_alone(ownership: KVOwnership) -> None:
    blocks = _held(ownership)
    first, second = ownership.open(Direction.OUT, blocks), ownership.open(Direction.OUT, blocks)
    with pytest.raises(AssertionError, match="leased"):
        ownership.open(Direction.IN, blocks)
    ownership.close(first)
    ownership.collect()
    assert ownership.state(blocks[0]) is BlockState.LEASED
    ownership.close(second)
    ownership.collect()
    ownership.open(Direction.IN, blocks)
    with pytest.raises(AssertionError, match="loading"):
        ownership.open(Direction.OUT, blocks)


def test_transfer_of_a_free_block_is_our_bug(ownership: KVOwnership) -> None:
    with pytest.raises(AssertionError, match="not held"):
        ownership.open(Direction.OUT, [0])


def test_using_block_ends_what_it_began_also_after_an_error(ownership: KVOwnership) -> None:
    ref = ownership.open(Direction.OUT, _held(ownership))

    def read() -> None:
        with ownership.using(ref) as is_open:
            assert is_open
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    ownership.close(ref)
    assert ownership.collect() == [ref]
