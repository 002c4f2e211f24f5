"""The other ranks of a replica, owned by rank 0: started, sent steps, monitored and ended together. Free of torch."""

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
    """A rank died, hangs or failed, so the replica must end: its ranks can only be started again together."""


class RankStartError(ValueError):
    """The ranks did not start; the message names the rank, the reason and the fix."""


class Ranks:
    """Owns the processes of ranks 1 to size - 1 and the connections to them. No process outlives it.

    The first lost rank is remembered: `check`, `send_step` and `send_order` then raise RankLost with its reason.
    """

    def __init__(self, launcher: RankLauncher, size: int, *, init_deadline_s: float, rank_deadline_s: float, num_threads: int) -> None:
        """Starts the processes and returns when all have connected. Raises RankStartError."""
        self.size = size
        self.host = launcher.host
        self.message_seconds = 0.0
        """Total seconds spent in sending steps."""
        self._init_deadline_s, self._rank_deadline_s = init_deadline_s, rank_deadline_s
        self._interval_s = min(MAX_PING_INTERVAL_S, rank_deadline_s / 4)  # between two pings
        self._until_s = time.monotonic() + init_deadline_s
        self._launched: dict[int, LaunchedRank] = {}  # rank -> its process
        self._channels: dict[int, Channel] = {}  # rank -> connection to it
        self._num_unanswered: dict[int, int] = {}  # rank -> pings since its last frame; not seconds, because rank 0 itself may sleep
        self._ready: dict[int, str] = {}  # rank -> text about its part, for the log
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
            logger.warning("rejected a connection that is not from a rank of this replica")
            channel.close()
            return
        connection.settimeout(None)
        self._channels[rank] = channel

    def _check_start(self) -> None:
        """Raises RankStartError if a rank ended before it connected, or at the deadline."""
        missing = [rank for rank in self._launched if rank not in self._channels]
        for rank in missing:
            if (reason := self._launched[rank].why_ended()) is not None:
                raise RankStartError(f"tensor_parallel_size {self.size}: rank {rank} ended before it was ready: {reason}")
        if time.monotonic() > self._until_s:
            raise RankStartError(
                f"tensor_parallel_size {self.size}: rank {', '.join(map(str, missing))} did not call back within "
                f"{self._init_deadline_s:g} s; raise parallel.init_deadline_s, or find what delays its process"
            )

    def set_up(self, setup: Mapping[str, Any]) -> None:
        """Sends every rank its setup; the ranks start loading at once."""
        payload = json.dumps(setup).encode()
        for channel in self._channels.values():
            self._send(channel, Kind.SETUP, payload)

    def when_lost(self, call: Callable[[], None]) -> None:
        """Registers `call`, made once, from another thread, when a rank is lost: NCCL's waits must be ended from outside."""
        self._on_lost = call
        if self._lost is not None:
            call()

    def when_answered(self, call: Callable[[int, bytes], None]) -> None:
        """Registers `call(rank, answer)`, made from the thread that listens to the rank; register it before `set_up`. If it raises
        ValueError, for an invalid answer, the replica ends."""
        self._on_answer = call

    def wait_ready(self) -> dict[int, str]:
        """Waits until every rank can take steps; returns rank -> its text. Raises RankStartError with the reason of the failed one."""
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
        """Sends a step to every rank. Raises RankLost."""
        start_s = time.perf_counter()
        self.check()
        for channel in self._channels.values():
            self._send(channel, Kind.STEP, message)
        self.message_seconds += time.perf_counter() - start_s

    def send_order(self, payload: bytes) -> None:
        """Sends an order, which every rank executes after the steps sent before it. Raises RankLost."""
        self.check()
        for channel in self._channels.values():
            self._send(channel, Kind.ORDER, payload)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        """Raises RankLost once a rank is lost. Callable from any thread."""
        if self._lost is not None:
            raise RankLost(self._lost)

    def lost_because(self, error: BaseException, patience_s: float = 1.0) -> RankLost:
        """The error to raise after a step failed with `error`: a rank's own reason if one arrives in time, else `error`."""
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
            launched.kill()  # Gloo's waits end only when the other process has gone
        self._on_lost()

    def _listen(self, rank: int, channel: Channel) -> None:
        """Runs in a thread for each rank: handles its frames until the connection closes."""
        while True:
            try:
                kind, payload = channel.receive()
            except ChannelClosed:
                self._note_death(rank)
                return
            self._num_unanswered[rank] = 0
            if kind is Kind.FAILED:
                time.sleep(2 * POLL_S)  # a dead rank makes the others fail too: its own loss must be noted first
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
        """Notes the loss of a rank whose connection has closed."""
        if self._is_closing.wait(POLL_S):  # gives the process time to end, so that its exit code is known
            return
        reason = self._launched[rank].why_ended()
        self._lose(f"rank {rank} has died" + (f" ({reason})" if reason else ""))

    def _silence(self) -> str | None:
        """A message about the rank that missed the most pings, if it missed more than two: it is the cause of other ranks' failures."""
        if len(self._ready) < self.size - 1:
            return None  # a loading rank may be slow to answer
        rank = max(self._num_unanswered, key=lambda one: self._num_unanswered[one])
        return self._hang(rank) if self._num_unanswered[rank] > 2 else None

    def _hang(self, rank: int) -> str:
        return f"rank {rank} hangs: no sign of life for {self._num_unanswered[rank] * self._interval_s:.1f} s"

    def _watch(self) -> None:
        """Runs in a thread: pings the ranks, so that a hung rank is noticed even without work."""
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
