"""The transfer server and its receivers: transports tried in turn, links kept, silence and nonsense."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache.handoff import HeadShare
from kvcache.ownership import TransferRef
from kvcache.spec import CANONICAL_LAYOUT
from kvcache.transfer.control import ControlChannel
from kvcache.transfer.link import Connector, LinkLost, SourceSession
from kvcache.transfer.process_group import ProcessGroupTransport
from kvcache.transfer.pull import HandoffPull, PullOutcome
from kvcache.transfer.remote import RemoteConnector
from kvcache.transfer.server import IDLE_S, TransferServer
from tests.transfer_sides import CPU, NUM_HEADS, Pulling, Side, make_handoff, reserve


def test_silent_server_is_given_up_at_the_deadline() -> None:
    side = Side(CANONICAL_LAYOUT)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes the connection and never says a word
        connector = RemoteConnector([ProcessGroupTransport(CPU)], side.kv, deadline_s=0.2)
        start_s = time.monotonic()
        with pytest.raises(LinkLost, match="makes no link"):
            connector.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        assert time.monotonic() - start_s < 5


def test_server_answers_nonsense_with_the_reason_and_goes_on() -> None:
    side = Side(CANONICAL_LAYOUT)
    transport = ProcessGroupTransport(CPU)
    server = TransferServer(side.source, {transport.name: transport})
    host, port = "127.0.0.1", int(server.address.rsplit(":", 1)[1])
    with ControlChannel.connect(host, port, 5.0) as channel:
        channel.send({"transport": "pigeons"}, 5.0)
        assert "pigeons" in channel.receive(5.0)["error"]
    with ControlChannel.connect(host, port, 5.0) as channel:
        channel.send({"transport": transport.name}, 5.0)
        link = ProcessGroupTransport(CPU).join(channel.receive(5.0)["invitation"])
        for message in ({}, {"lease": 0, "epoch": 1, "do": "dance"}, {"lease": "x", "epoch": 1, "do": "renew"}):
            channel.send(message, 5.0)
            assert "makes no sense" in channel.receive(5.0)["error"]
        channel.send({"lease": 0, "epoch": 1, "do": "renew"}, 5.0)
        assert "not open" in channel.receive(5.0)["error"]
        link.close()
    server.close()


def test_control_channel_with_too_long_a_message_is_lost() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ControlChannel.connect("127.0.0.1", listener.getsockname()[1], 5.0) as ours,
        listener.accept()[0] as other,
    ):
        other.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(LinkLost, match="more than"):
            ours.receive(5.0)


def test_link_is_kept_for_the_next_handoff() -> None:
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    transport = ProcessGroupTransport(CPU)
    server = TransferServer(giver.source, {transport.name: transport})
    connector = RemoteConnector([ProcessGroupTransport(CPU)], taker.kv)
    first = connector.connect(server.address)
    first.close(is_reusable=True)
    assert connector.connect(server.address) is first
    first.close(is_reusable=True)
    server.close()
    with pytest.raises(LinkLost, match="no transfer server"):
        connector.connect(server.address)
    connector.close()


def test_session_that_nobody_asks_for_is_closed_once_the_other_side_gave_it_up() -> None:
    taker = Side(CANONICAL_LAYOUT)
    transport = ProcessGroupTransport(CPU)
    servers = [TransferServer(Side(CANONICAL_LAYOUT).source, {transport.name: transport}) for _ in range(2)]
    now_s = 0.0
    connector = RemoteConnector([ProcessGroupTransport(CPU)], taker.kv, clock=lambda: now_s)
    old = connector.connect(servers[0].address)
    old.close(is_reusable=True)
    now_s = IDLE_S + 1
    connector.connect(servers[1].address).close(is_reusable=True)
    assert old.is_broken()
    new = connector.connect(servers[0].address)
    assert new is not old
    new.close()
    connector.close()
    for server in servers:
        server.close()


class Broken:
    """Stands for a connector with a bug."""

    def connect(self, address: str) -> SourceSession:
        raise KeyError("invitation")


def test_pull_ends_with_an_outcome_whatever_its_transport_raises() -> None:
    side = Side(CANONICAL_LAYOUT)
    outcomes: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    HandoffPull(
        make_handoff(TransferRef(1, 1), 4, HeadShare(first=0, end=NUM_HEADS, address="tcp://127.0.0.1:1")),
        (0, NUM_HEADS),
        connector=Broken(),
        transfers=side.ownership,
        kv=side.kv,
        on_end=outcomes.put,
        deadline_s=1.0,
    )
    assert "invitation" in str(outcomes.get(timeout=5.0).error)


def test_peer_that_never_joins_its_group_holds_up_no_other() -> None:
    side = Side(CANONICAL_LAYOUT)
    transport = ProcessGroupTransport(CPU, deadline_s=2.0)
    server = TransferServer(side.source, {transport.name: transport})
    connector = RemoteConnector([ProcessGroupTransport(CPU)], side.kv)
    with ControlChannel.connect("127.0.0.1", int(server.address.rsplit(":", 1)[1]), 5.0) as dead:
        dead.send({"transport": transport.name}, 5.0)
        assert dead.receive(5.0)["ok"]  # invited, and never heard of again
        start_s = time.monotonic()
        connector.connect(server.address).close()
        assert time.monotonic() - start_s < 1.5
    server.close()


class LostLink:
    def receive(self, ticket: str, num_bytes: int) -> None:
        raise LinkLost("a hawk came")

    def close(self) -> None:
        pass


class Pigeons(ProcessGroupTransport):
    """A transport that works, or not, as a test wants it."""

    name = "pigeons"
    fails_to = ""  # join or receive
    num_joins = 0

    def join(self, invitation: dict[str, Any]) -> Any:
        self.num_joins += 1
        if self.fails_to == "join":
            raise LinkLost("the pigeons are asleep")
        link = super().join(invitation)
        return LostLink() if self.fails_to == "receive" else link


def _asks_pigeons_first(connector: RemoteConnector, pigeons: Pigeons, server: TransferServer) -> bool:
    """Whether a new session is tried over pigeons; while they join, they are tried only if they are first."""
    before, pigeons.fails_to = pigeons.num_joins, ""
    connector.connect(server.address).close()
    return pigeons.num_joins > before


def _pull_over(server: TransferServer, giver: Side, connector: Connector, taker: Side) -> PullOutcome:
    ref, given = giver.offer(4)
    giver.source.note_computed(ref, 4)
    giver.source.complete(ref, [1])
    pulling = Pulling(taker, make_handoff(ref, 4, HeadShare(first=0, end=NUM_HEADS, address=server.address)), connector)
    load, taken = reserve(taker, pulling, 1)
    outcome = pulling.outcome()
    for side, one, block_ids in ((giver, ref, given), (taker, load, taken)):
        side.ownership.close(one)
        side.pool.release(block_ids)
        side.ownership.collect()
    return outcome


@pytest.fixture
def two_ways() -> Iterator[tuple[Side, TransferServer, Side, Pigeons, RemoteConnector]]:
    """A source that is served over pigeons and process groups, and a receiver that prefers pigeons."""
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    server = TransferServer(giver.source, {one.name: one for one in (Pigeons(CPU, deadline_s=0.5), ProcessGroupTransport(CPU))})
    pigeons = Pigeons(CPU)
    connector = RemoteConnector([pigeons, ProcessGroupTransport(CPU)], taker.kv)
    yield giver, server, taker, pigeons, connector
    connector.close()
    server.close()


def test_transport_that_makes_no_link_is_tried_last_from_then_on(
    two_ways: tuple[Side, TransferServer, Side, Pigeons, RemoteConnector], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kvcache")
    giver, server, taker, pigeons, connector = two_ways
    pigeons.fails_to = "join"
    for _ in range(2):
        assert _pull_over(server, giver, connector, taker).error is None
        connector.close()  # so that the next one connects anew
    assert not _asks_pigeons_first(connector, pigeons, server)
    assert sum("the pigeons are asleep" in record.getMessage() for record in caplog.records) == 1


def test_transport_that_brought_nothing_yet_and_breaks_leaves_its_place(
    two_ways: tuple[Side, TransferServer, Side, Pigeons, RemoteConnector],
) -> None:
    giver, server, taker, pigeons, connector = two_ways
    pigeons.fails_to = "receive"
    assert _pull_over(server, giver, connector, taker).error is not None
    assert _pull_over(server, giver, connector, taker).error is None
    connector.close()
    assert not _asks_pigeons_first(connector, pigeons, server)


def test_transport_that_worked_keeps_its_place_and_is_forgotten_with_the_server(
    two_ways: tuple[Side, TransferServer, Side, Pigeons, RemoteConnector],
) -> None:
    giver, server, taker, pigeons, connector = two_ways
    assert _pull_over(server, giver, connector, taker).error is None
    connector.close()
    connector.note_failure(server.address, "pigeons")
    assert _asks_pigeons_first(connector, pigeons, server), "it only lost its lead"
    connector.note_failure(server.address, "pigeons")
    assert not _asks_pigeons_first(connector, pigeons, server)
    server.close()
    with pytest.raises(LinkLost, match="no transfer server answers"):
        connector.connect(server.address)
    host, port = server.address.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_server((host, int(port))) as another:  # which comes up where the old one was, and is asked for pigeons
        asked: list[object] = []

        def answer_once() -> None:
            with ControlChannel(another.accept()[0]) as channel:
                asked.append(channel.receive(5.0))

        answering = threading.Thread(target=answer_once)
        answering.start()
        with pytest.raises(LinkLost, match="makes no link"):
            connector.connect(server.address)
        answering.join()
    assert asked == [{"transport": "pigeons"}]


def test_source_without_any_wanted_transport_is_refused_with_every_reason() -> None:
    giver, taker = Side(CANONICAL_LAYOUT), Side(CANONICAL_LAYOUT)
    server = TransferServer(giver.source, {"post": ProcessGroupTransport(CPU)})
    connector = RemoteConnector([Pigeons(CPU), ProcessGroupTransport(CPU)], taker.kv)
    with pytest.raises(LinkLost, match=r"makes no link: pigeons: .* is not one of \['post'\]; process-group: "):
        connector.connect(server.address)
    server.close()
