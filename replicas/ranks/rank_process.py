"""The process of a rank above 0: loads its part, then runs rank 0's steps and executes its orders, in the order sent.

The process ends with rank 0, whatever it is computing: the connection closes, and a thread that only listens ends the process.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from replicas.process.heap import freeze_heap
from replicas.ranks.channel import Channel, ChannelClosed, Kind, RankAddress, connect

if TYPE_CHECKING:
    from kvcache.transfer.link import TransportMaker

logger = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 30.0


class RankWork:
    """Queue of rank 0's steps and orders. Owns the thread that receives them and answers pings."""

    def __init__(self, channel: Channel, on_orphaned: Callable[[], None]) -> None:
        """`on_orphaned` is called from that thread when the connection closes before rank 0 said stop."""
        self._channel, self._on_orphaned = channel, on_orphaned
        self._work: queue.SimpleQueue[tuple[Kind, bytes] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="rank 0", daemon=True).start()

    def next(self) -> tuple[Kind, bytes] | None:
        """Waits for a step or an order and returns its message; None when rank 0 said stop."""
        return self._work.get()

    def _listen(self) -> None:
        while True:
            try:
                kind, payload = self._channel.receive()
                if kind is Kind.PING:
                    self._channel.send(Kind.PONG)
            except ChannelClosed:
                self._on_orphaned()
                return
            if kind in (Kind.STEP, Kind.ORDER):
                self._work.put((kind, payload))
            elif kind is Kind.STOP:
                self._work.put(None)
                return


class OwnProcess:
    """Process-wide actions of a rank that has a process to itself."""

    def end(self) -> None:
        """Exits at once: rank 0 has gone, and other threads may wait for it forever."""
        os._exit(1)

    def freeze_heap(self) -> None:
        freeze_heap()

    def set_log_level(self, level: int) -> None:
        logging.getLogger("replicas").setLevel(level)


def run_rank(address: RankAddress, process: OwnProcess | None = None, extra_transports: Sequence[TransportMaker] = ()) -> None:
    """Runs a rank until rank 0 says stop, or has gone. `extra_transports` are rank 0's transports other than process groups."""
    process = process or OwnProcess()
    channel = connect(address, CONNECT_DEADLINE_S, CONNECT_DEADLINE_S)
    try:
        channel.send(Kind.HELLO, json.dumps({"rank": address.rank, "token": address.token}).encode())
        try:
            kind, payload = channel.receive()
        except ChannelClosed:
            return  # rank 0 gave up: another rank did not start
        if kind is Kind.SETUP:
            _serve(channel, json.loads(payload), address, process, extra_transports)
    finally:
        channel.close()


def _serve(
    channel: Channel, setup: dict[str, Any], address: RankAddress, process: OwnProcess, extra_transports: Sequence[TransportMaker]
) -> None:
    process.set_log_level(setup["log_level"])
    work = RankWork(channel, process.end)
    with ExitStack() as stack:
        try:
            from replicas.ranks.follower import Follower  # imports torch and transformers, so only after the hello

            follower = Follower(setup, address, channel, extra_transports)
            stack.callback(follower.close)
            process.freeze_heap()
            channel.send(Kind.READY, str(follower).encode())
            while (message := work.next()) is not None:
                follower.obey(*message)
        except BaseException as error:
            logger.exception("rank %d failed", address.rank)
            lines = str(error).strip().splitlines()
            channel.send(Kind.FAILED, (lines[0] if lines else type(error).__name__).encode())
            raise


def main() -> None:
    address = RankAddress(**json.loads(sys.stdin.buffer.read()))
    logging.basicConfig(level=logging.WARNING, format=f"rank {address.rank}: %(levelname)s %(name)s: %(message)s")
    run_rank(address)


if __name__ == "__main__":
    main()
