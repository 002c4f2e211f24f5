"""Rank 0's view of its ranks: started, fed, watched and ended, with ranks that are played by threads of the test."""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable

import pytest

from replicas.ranks.channel import Channel, ChannelClosed, Kind, RankAddress, connect
from replicas.ranks.launcher import LaunchedRank
from replicas.ranks.rank_process import RankWork
from replicas.ranks.ranks import RankLost, Ranks, RankStartError

PATIENCE_S = 10.0


class PlayedRank:
    """Runs `play(channel)` in a thread once it has called rank 0."""

    def __init__(self, address: RankAddress, play: Callable[[Channel], None], token: str | None = None) -> None:
        self.address, self.play, self.token = address, play, token or address.token
        self.ended: str | None = None
        self.channel: Channel | None = None
        self.is_killed = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.channel = connect(self.address, PATIENCE_S, PATIENCE_S)
        try:
            self.channel.send(Kind.HELLO, json.dumps({"rank": self.address.rank, "token": self.token}).encode())
            self.play(self.channel)
            self.ended = "exit code 0"
        except ChannelClosed:
            self.ended = "the line closed"
        finally:
            self.channel.close()

    def why_ended(self) -> str | None:
        return None if self.thread.is_alive() else self.ended

    def kill(self) -> None:
        self.is_killed = True


class PlayedLauncher:
    host = "127.0.0.1"
    shows_all_devices = True

    def __init__(self, *plays: Callable[[Channel], None]) -> None:
        self.plays = plays
        self.ranks: list[PlayedRank] = []

    def launch(self, address: RankAddress, num_threads: int) -> LaunchedRank:
        self.ranks.append(PlayedRank(address, self.plays[address.rank - 1]))
        return self.ranks[-1]


def _obey(received: list[tuple[Kind, bytes]]) -> Callable[[Channel], None]:
    """What a good rank does; all that it is told but pings goes to `received`."""

    def play(channel: Channel) -> None:
        while True:
            kind, payload = channel.receive()
            if kind is Kind.PING:
                channel.send(Kind.PONG)
                continue
            received.append((kind, payload))
            if kind is Kind.SETUP:
                channel.send(Kind.READY, b"loaded")
            if kind is Kind.STOP:
                return

    return play


def _start(launcher: PlayedLauncher, *, init_deadline_s: float = PATIENCE_S, rank_deadline_s: float = PATIENCE_S) -> Ranks:
    size = len(launcher.plays) + 1
    return Ranks(launcher, size, init_deadline_s=init_deadline_s, rank_deadline_s=rank_deadline_s, num_threads=1)


def _wait_lost(ranks: Ranks) -> str:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            ranks.check()
        except RankLost as lost:
            return str(lost)
        threading.Event().wait(0.01)
    raise AssertionError("the loss was not noticed")


def test_ranks_are_set_up_get_every_step_in_order_and_are_stopped() -> None:
    received: list[list[tuple[Kind, bytes]]] = [[], []]
    launcher = PlayedLauncher(*map(_obey, received))
    ranks = _start(launcher)
    ranks.set_up({"name": "value"})
    assert ranks.wait_ready() == {1: "loaded", 2: "loaded"}
    for step in (b"first", b"", b"third" * 1000):
        ranks.send_step(step)
    ranks.close()
    expected = [(Kind.SETUP, b'{"name": "value"}'), (Kind.STEP, b"first"), (Kind.STEP, b""), (Kind.STEP, b"third" * 1000), (Kind.STOP, b"")]
    assert received == [expected, expected]
    assert not any(rank.thread.is_alive() for rank in launcher.ranks)


def test_orders_and_steps_come_out_of_a_rank_in_turn_and_its_answers_arrive() -> None:
    worked: list[tuple[Kind, bytes] | None] = []

    def play(channel: Channel) -> None:
        work = RankWork(channel, lambda: None)
        channel.send(Kind.READY, b"loaded")
        while not worked or worked[-1] is not None:
            worked.append(work.next())
            channel.send(Kind.ANSWER, f"{len(worked)}".encode())

    ranks = _start(PlayedLauncher(play))
    answers: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    ranks.when_answered(lambda rank, payload: answers.put((rank, payload)))
    ranks.wait_ready()
    ranks.send_step(b"step")
    ranks.send_order(b"order")
    ranks.send_step(b"step")
    assert [answers.get(timeout=PATIENCE_S) for _ in range(3)] == [(1, b"1"), (1, b"2"), (1, b"3")]
    ranks.close()
    assert worked == [(Kind.STEP, b"step"), (Kind.ORDER, b"order"), (Kind.STEP, b"step"), None]


def test_rank_whose_answer_makes_no_sense_is_lost_with_the_reason() -> None:
    def refuse(rank: int, payload: bytes) -> None:
        raise ValueError("a dance is no answer")

    def play(channel: Channel) -> None:
        channel.receive()
        channel.send(Kind.ANSWER, b"dance")
        channel.receive()

    ranks = _start(PlayedLauncher(play))
    ranks.when_answered(refuse)
    ranks.set_up({})
    assert _wait_lost(ranks) == "rank 1: a dance is no answer"
    assert ranks.is_lost
    with pytest.raises(RankLost, match="a dance is no answer"):
        ranks.send_order(b"order")
    ranks.close()


def test_rank_whose_line_closes_is_lost_at_once_and_ends_the_waits_of_others() -> None:
    received: list[tuple[Kind, bytes]] = []
    launcher = PlayedLauncher(_obey(received), _obey([]))
    ranks = _start(launcher)
    ranks.set_up({})
    ranks.wait_ready()
    ended = threading.Event()
    ranks.when_lost(ended.set)
    assert launcher.ranks[0].channel is not None
    launcher.ranks[0].channel.close()
    assert ended.wait(PATIENCE_S)
    assert _wait_lost(ranks).startswith("rank 1 has died")
    with pytest.raises(RankLost, match="rank 1 has died"):
        ranks.send_step(b"step")
    ranks.close()
    assert all(rank.is_killed for rank in launcher.ranks), "what is left of the group ends too"


def test_rank_that_fails_is_lost_with_its_own_words() -> None:
    def play(channel: Channel) -> None:
        channel.send(Kind.FAILED, b"CUDA out of memory")
        channel.receive()

    launcher = PlayedLauncher(play)
    ranks = _start(launcher)
    assert _wait_lost(ranks) == "rank 1: CUDA out of memory"
    with pytest.raises(RankStartError, match="tensor_parallel_size 2: rank 1: CUDA out of memory"):
        ranks.wait_ready()
    ranks.close()


def test_rank_that_answers_no_ping_is_lost_after_the_deadline_without_any_work() -> None:
    stop = threading.Event()

    def play(channel: Channel) -> None:
        channel.send(Kind.READY, b"loaded")
        stop.wait(PATIENCE_S)

    ranks = _start(PlayedLauncher(play), rank_deadline_s=0.2)
    ranks.wait_ready()
    assert _wait_lost(ranks).startswith("rank 1 hangs: no sign of life")
    stop.set()
    ranks.close()


def test_rank_that_fails_because_another_one_died_or_hangs_is_not_the_one_that_is_named() -> None:
    is_long_silent = threading.Event()

    def fail(channel: Channel) -> None:
        channel.send(Kind.READY, b"loaded")
        num_pings = 0
        while channel.receive()[0] is not Kind.STEP:
            channel.send(Kind.PONG)
            num_pings += 1
            if num_pings == 4:  # a deadline has four; the other rank has answered none of them
                is_long_silent.set()
        channel.send(Kind.FAILED, b"Connection reset by peer")
        channel.receive()

    stop = threading.Event()

    def hang(channel: Channel) -> None:
        channel.send(Kind.READY, b"loaded")
        stop.wait(PATIENCE_S)

    ranks = _start(PlayedLauncher(fail, hang), rank_deadline_s=0.4)
    ranks.wait_ready()
    assert is_long_silent.wait(PATIENCE_S)
    ranks.send_step(b"step")
    assert _wait_lost(ranks).startswith("rank 2 hangs")
    stop.set()
    ranks.close()


def test_rank_that_ends_before_it_calls_back_is_named_with_its_reason() -> None:
    class Ended:
        def why_ended(self) -> str:
            return "exit code 3; its output says why"

        def kill(self) -> None:
            pass

    class Launcher:
        host = "127.0.0.1"
        shows_all_devices = True

        def launch(self, address: RankAddress, num_threads: int) -> LaunchedRank:
            return Ended()

    with pytest.raises(RankStartError, match="tensor_parallel_size 2: rank 1 ended before it was ready: exit code 3"):
        Ranks(Launcher(), 2, init_deadline_s=PATIENCE_S, rank_deadline_s=PATIENCE_S, num_threads=1)


def test_rank_that_never_calls_back_is_given_up_at_the_deadline() -> None:
    class Silent:
        is_killed = False

        def why_ended(self) -> None:
            return None

        def kill(self) -> None:
            self.is_killed = True

    class Launcher:
        host = "127.0.0.1"
        shows_all_devices = True
        rank = Silent()

        def launch(self, address: RankAddress, num_threads: int) -> LaunchedRank:
            return self.rank

    launcher = Launcher()
    with pytest.raises(RankStartError, match=r"rank 1 did not call back within 0.2 s; raise parallel.init_deadline_s"):
        Ranks(launcher, 2, init_deadline_s=0.2, rank_deadline_s=0.2, num_threads=1)
    assert launcher.rank.is_killed


def test_stranger_that_connects_is_turned_away_and_the_rank_still_comes_in() -> None:
    class Launcher(PlayedLauncher):
        def launch(self, address: RankAddress, num_threads: int) -> LaunchedRank:
            self.stranger = PlayedRank(address, lambda channel: _ignore(channel.receive()), token="guess")
            self.mute = socket.create_connection((address.host, address.port))
            self.mute.close()
            return super().launch(address, num_threads)

    launcher = Launcher(_obey([]))
    ranks = _start(launcher)
    ranks.set_up({})
    assert ranks.wait_ready() == {1: "loaded"}
    launcher.stranger.thread.join(PATIENCE_S)
    assert launcher.stranger.ended == "the line closed"
    ranks.close()


def _ignore(_: object) -> None:
    """For a statement where an expression is due."""
