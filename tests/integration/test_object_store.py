"""KV messages through Ray's object store between processes: whole, in time, and nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from kvcache.transfer.link import LinkLost
from kvcache.transfer.object_store import ObjectStoreLink
from replicas.serve.object_store import object_store_transport
from tests.object_store_source import MESSAGE_BYTES, ObjectStoreSource

NUM_TRANSFERS = 300
FREED_TOGETHER = 100
"""Ray gives the memory of so many freed objects back at once, or of fewer after a second: how many depends on the machine's speed."""
DEADLINE_S = 2.0
PATIENCE_S = 20.0
ERROR_BYTES = 100
"""A lost object is itself an object to whoever asked for it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def source(local_ray: int) -> Iterator[Any]:
    actor = ray.remote(ObjectStoreSource).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


def _link(source: Any) -> ObjectStoreLink:
    transport = object_store_transport(torch.device("cpu"))
    transport._deadline_s = DEADLINE_S
    return transport.join(ray.get(source.invite.remote()))


def _store_bytes() -> int:
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.object_store_bytes_used)


def _wait_store_bytes(at_most: int) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while (used := _store_bytes()) > at_most:
        assert time.monotonic() < until_s, f"the store still holds {used} bytes"
        time.sleep(0.1)


def test_hundreds_of_messages_arrive_and_leave_the_store_as_it_was(source: Any) -> None:
    link = _link(source)
    before = _store_bytes()
    most = 0
    for number in range(NUM_TRANSFERS):
        ticket = ray.get(source.announce.remote(number % 256))
        data = link.receive(ticket, MESSAGE_BYTES)
        assert data.unique().tolist() == [number % 256]
        most = max(most, _store_bytes() - before) if number % 20 == 0 else most
    assert MESSAGE_BYTES <= most < (FREED_TOGETHER + 10) * MESSAGE_BYTES, "a message goes when the next is asked for"
    ray.get(source.settle.remote())
    _wait_store_bytes(before)


def test_message_that_was_freed_or_whose_owner_died_is_a_link_lost_in_time(source: Any) -> None:
    link = _link(source)
    before = _store_bytes()
    freed = ray.get(source.announce.remote(1))
    ray.get(source.settle.remote())
    _wait_store_bytes(before)
    _assert_lost_in_time(link, freed)
    orphaned = ray.get(source.announce.remote(2))
    ray.kill(source)
    _wait_store_bytes(before + ERROR_BYTES)
    _assert_lost_in_time(link, orphaned)


def _assert_lost_in_time(link: ObjectStoreLink, ticket: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(LinkLost):
        link.receive(ticket, MESSAGE_BYTES)
    assert time.monotonic() - start_s < DEADLINE_S + 1
