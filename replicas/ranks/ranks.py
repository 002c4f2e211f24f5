"""The other ranks of a replica, owned by rank 0: started, fed with steps, watched and ended together. Free of torch."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from replicas.ranks.channel import Channel, ChannelClosed, Kind, RankAddress
from replicas.ranks.launcher import LaunchedRank, RankLauncher

logger = logging.getLogger(__name__)

MAX_PING_INTERVAL_S = 1.0
POLL_S = 0.1
MAX_HELLO_BYTES = 1024
STOP_DEADLINE_S = 3.0


class RankLost(Exception):
    """A rank died, hangs or failed, and with it the replica: its ranks can only start again, together."""


class RankStartError(ValueError):
    """The ranks did not come together; the message names the rank, the reason and what to change."""


class Ranks:
    """Owns the processes of ranks 1 to size - 1 and the lines to them. None of them outlives it.

    The first that is lost is remembered and reported to everyone who asks; nothing works from then on but `close`.
    """

    def __init__(self, launcher: RankLauncher, size: int, *, init_deadline_s: float, rank_deadline_s: float, num_threads: int) -> None:
        """Starts the processes and returns when all have called back. Raises RankStartError."""
        self.size = size
        self.host = launcher.host
        self.message_seconds = 0.0
        """Spent in sending steps so far."""
        self._init_deadline_s, self._rank_deadline_s = init_deadline_s, rank_deadline_s
        self._interval_s = min(MAX_PING_INTERVAL_S, rank_deadline_s / 4)  # between two pings
        self._until_s = time.monotonic() + init_deadline_s
        self._launched: dict[int, LaunchedRank] = {}  # rank -> its process
        self._channels: dict[int, Channel] = {}  # rank -> the line to it
        self._num_unanswered: dict[int, int] = {}  # rank -> pings since its last word: a sleep of rank 0 itself is nobody's silence
        self._ready: dict[int, str] = {}  # rank -> what it holds, for the log
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._is_closing = threading.Event()
        self._on_lost: Callable[[], None] = lambda: None
        self._on_answer: Callable[[int, bytes], None] = lambda rank, payload: None
        self._threads: list[threading.Thread] = []
        try:
            self._start(launcher, num_threads)
        except BaseException:
            self.close()
            raise

    def _start(self, launcher: RankLauncher, num_threads: int) -> None:
        token = secrets.token_hex(16)
        with socket.create_server((self.host, 0), backlog=self.size) as listener:
            for rank in range(1, self.size):
                address = RankAddress(host=self.host, port=listener.getsockname()[1], rank=rank, token=token)
                self._launched[rank] = launcher.launch(address, num_threads)
            listener.settimeout(POLL_S)
            while len(self._channels) < self.size - 1:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    self._check_start()
                    continue
                self._greet(connection, token)
        for rank, channel in self._channels.items():
            self._num_unanswered[rank] = 0
            self._spawn(partial(self._listen, rank, channel), f"rank {rank}")
        self._spawn(self._watch, "ranks")

    def _greet(self, connection: socket.socket, token: str) -> None:
        connection.settimeout(self._rank_deadline_s)
        channel = Channel(connection, self._rank_deadline_s)
        connection.settimeout(self._rank_deadline_s)
        try:
            kind, payload = channel.receive(MAX_HELLO_BYTES)
            hello: Any = json.loads(payload) if kind is Kind.HELLO else None
            is_ours = isinstance(hello, dict) and secrets.compare_digest(str(hello.get("token")).encode(), token.encode())
            rank = hello["rank"] if is_ours else None
        except (ChannelClosed, ValueError):
            rank = None
        if rank not in self._launched or rank in self._channels:
            logger.warning("turned away a connection that is not from a rank of this replica")
            channel.close()
            return
        connection.settimeout(None)
        self._channels[rank] = channel

    def _check_start(self) -> None:
        """Raises RankStartError when a rank that has not called back has ended, or at the deadline."""
        missing = [rank for rank in self._launched if rank not in self._channels]
        for rank in missing:
            if (reason := self._launched[rank].why_ended()) is not None:
                raise RankStartError(f"tensor_parallel_size {self.size}: rank {rank} ended before it was ready: {reason}")
        if time.monotonic() > self._until_s:
            raise RankStartError(
                f"tensor_parallel_size {self.size}: rank {', '.join(map(str, missing))} did not call back within "
                f"{self._init_deadline_s:g} s; raise parallel.init_deadline_s, or look for what holds its process up"
            )

    def set_up(self, setup: Mapping[str, Any]) -> None:
        """Tells every rank what to load; they begin at once."""
        payload = json.dumps(setup).encode()
        for channel in self._channels.values():
            self._send(channel, Kind.SETUP, payload)

    def when_lost(self, call: Callable[[], None]) -> None:
        """`call` is made once, from another thread, as soon as a rank is lost: NCCL must be told to end its waits."""
        self._on_lost = call
        if self._lost is not None:
            call()

    def when_answered(self, call: Callable[[int, bytes], None]) -> None:
        """`call` gets a rank and its answer, from the thread that listens to it. Set before the ranks are set up. It raises
        ValueError for what makes no sense, which ends the replica."""
        self._on_answer = call

    def wait_ready(self) -> dict[int, str]:
        """Waits until every rank can take steps; rank -> its text. Raises RankStartError with the reason of the one that cannot."""
        with self._changed:
            while len(self._ready) < self.size - 1:
                if self._lost is not None:
                    raise RankStartError(f"tensor_parallel_size {self.size}: {self._lost}")
                if (left_s := self._until_s - time.monotonic()) <= 0:
                    late = sorted(self._channels.keys() - self._ready.keys())
                    raise RankStartError(
                        f"tensor_parallel_size {self.size}: rank {', '.join(map(str, late))} was not ready within "
                        f"{self._init_deadline_s:g} s; raise parallel.init_deadline_s"
                    )
                self._changed.wait(left_s)
        return dict(sorted(self._ready.items()))

    def send_step(self, message: bytes) -> None:
        """Raises RankLost."""
        start_s = time.perf_counter()
        self.check()
        for channel in self._channels.values():
            self._send(channel, Kind.STEP, message)
        self.message_seconds += time.perf_counter() - start_s

    def send_order(self, payload: bytes) -> None:
        """To be obeyed by every rank after the steps before it. Raises RankLost."""
        self.check()
        for channel in self._channels.values():
            self._send(channel, Kind.ORDER, payload)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        """Raises RankLost once a rank is lost. Any thread may ask."""
        if self._lost is not None:
            raise RankLost(self._lost)

    def lost_because(self, error: BaseException, patience_s: float = 1.0) -> RankLost:
        """What to raise when a step broke with `error`: the reason that a rank gave, when one arrives in time, or else `error`."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, patience_s)
        self._lose(self._silence() or f"a step of rank 0 failed: {error}")
        return RankLost(self._lost)

    def close(self) -> None:
        """Ends every rank and returns when none is left."""
        self._is_closing.set()
        for channel in self._channels.values():
            try:
                channel.send(Kind.STOP)
            except ChannelClosed:
                logger.debug("a rank had gone before it was stopped")
        is_whole = self._lost is None and len(self._channels) == self.size - 1
        until_s = time.monotonic() + (STOP_DEADLINE_S if is_whole else 0)
        for launched in self._launched.values():
            while launched.why_ended() is None and time.monotonic() < until_s:
                time.sleep(0.01)
            launched.kill()
        for channel in self._channels.values():
            channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(STOP_DEADLINE_S)

    def _send(self, channel: Channel, kind: Kind, payload: bytes = b"") -> None:
        try:
            channel.send(kind, payload)
        except ChannelClosed as error:
            raise self.lost_because(error) from error

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._lost is not None or self._is_closing.is_set():
                return
            self._lost = reason
            self._changed.notify_all()
        logger.error("%s; the replica's ranks end together", reason)
        for launched in self._launched.values():
            launched.kill()  # Gloo ends a wait only when the other end has gone
        self._on_lost()

    def _listen(self, rank: int, channel: Channel) -> None:
        """In a thread for each rank: what it says, until its line closes."""
        while True:
            try:
                kind, payload = channel.receive()
            except ChannelClosed:
                self._note_death(rank)
                return
            self._num_unanswered[rank] = 0
            if kind is Kind.FAILED:
                time.sleep(2 * POLL_S)  # a rank that died takes the others' steps with it, but is the one to name
                self._lose(self._silence() or f"rank {rank}: {payload.decode()}")
            elif kind is Kind.READY:
                with self._changed:
                    self._ready[rank] = payload.decode()
                    self._changed.notify_all()
            elif kind is Kind.ANSWER:
                try:
                    self._on_answer(rank, payload)
                except ValueError as error:
                    self._lose(f"rank {rank}: {error}")

    def _note_death(self, rank: int) -> None:
        """Its line has closed."""
        if self._is_closing.wait(POLL_S):  # so that the process's own ending can be told
            return
        reason = self._launched[rank].why_ended()
        self._lose(f"rank {rank} has died" + (f" ({reason})" if reason else ""))

    def _silence(self) -> str | None:
        """The rank that has missed pings lately, where there is one: what breaks elsewhere is then its doing."""
        if len(self._ready) < self.size - 1:
            return None  # who imports or reads weights may be slow to answer
        rank = max(self._num_unanswered, key=lambda one: self._num_unanswered[one])
        return self._hang(rank) if self._num_unanswered[rank] > 2 else None

    def _hang(self, rank: int) -> str:
        return f"rank {rank} hangs: no sign of life for {self._num_unanswered[rank] * self._interval_s:.1f} s"

    def _watch(self) -> None:
        """In a thread: asks for signs of life, so that a rank that is stopped is noticed without any work to do."""
        while not self._is_closing.wait(self._interval_s):
            is_loading = len(self._ready) < self.size - 1
            deadline_s = self._init_deadline_s if is_loading else self._rank_deadline_s
            for rank, channel in self._channels.items():
                if self._num_unanswered[rank] * self._interval_s > deadline_s:
                    self._lose(self._hang(rank))
                self._num_unanswered[rank] += 1
                try:
                    channel.send(Kind.PING)
                except ChannelClosed:
                    self._note_death(rank)
