"""Links over an object store: nothing stays in it, and whatever is missing is a lost link."""

from __future__ import annotations

import pytest
import torch

from kvcache.transfer.link import LinkLost
from kvcache.transfer.object_store import ObjectStoreLink, ObjectStoreTransport
from tests.memory_store import MemoryStore

CPU = torch.device("cpu")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def links(store: MemoryStore) -> tuple[ObjectStoreLink, ObjectStoreLink]:
    source, target = ObjectStoreTransport(store, CPU), ObjectStoreTransport(store, CPU)
    invitation = source.invite()
    return source.accept(invitation), target.join(invitation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_message_arrives_whole_and_is_freed_when_the_receiver_speaks_again(
    store: MemoryStore, links: tuple[ObjectStoreLink, ObjectStoreLink], dtype: torch.dtype
) -> None:
    source, target = links
    data = torch.arange(100, dtype=dtype)
    ticket = source.announce(data)
    source.send(data)
    data.zero_()  # the sender's buffer may be used again at once
    received = target.receive(ticket, 100 * dtype.itemsize)
    assert torch.equal(received.view(dtype), torch.arange(100, dtype=dtype))
    received.add_(1)  # it is the receiver's own
    assert len(store.objects) == 1
    source.settle()
    assert store.objects == {}


def test_message_that_nobody_took_is_freed_with_its_link(store: MemoryStore, links: tuple[ObjectStoreLink, ObjectStoreLink]) -> None:
    source, target = links
    for _ in range(3):
        source.announce(torch.ones(10))
    target.close()
    assert len(store.objects) == 3, "the receiver owns none of them"
    source.close()
    assert store.objects == {}


@pytest.mark.parametrize(("ticket", "num_bytes"), [("77", 40), ("no ticket", 40), ("0", 39)], ids=["gone", "nonsense", "other size"])
def test_message_that_is_not_there_is_a_lost_link(links: tuple[ObjectStoreLink, ObjectStoreLink], ticket: str, num_bytes: int) -> None:
    source, target = links
    assert source.announce(torch.ones(10)) == "0"
    with pytest.raises(LinkLost):
        target.receive(ticket, num_bytes)


def test_full_store_is_a_lost_link(store: MemoryStore, links: tuple[ObjectStoreLink, ObjectStoreLink]) -> None:
    store.is_full = True
    with pytest.raises(LinkLost, match="takes no message of 40 bytes"):
        links[0].announce(torch.ones(10))


def test_receiver_with_another_store_is_told_before_it_waits(store: MemoryStore) -> None:
    other = MemoryStore()
    other.name = "elsewhere"
    with pytest.raises(LinkLost, match="here it is elsewhere"):
        ObjectStoreTransport(other, CPU).join(ObjectStoreTransport(store, CPU).invite())
