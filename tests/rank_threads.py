"""Ranks as threads of the test's process: the same code and sockets, without seconds of imports for each rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcache.transfer.link import TransportMaker
from replicas.ranks.channel import ChannelClosed, RankAddress
from replicas.ranks.launcher import LaunchedRank
from replicas.ranks.rank_process import OwnProcess, run_rank


class ThreadLauncher:
    host = "127.0.0.1"
    shows_all_devices = True

    def __init__(self, *extra_transports: TransportMaker) -> None:
        self.ranks: list[ThreadRank] = []
        self._extra_transports = extra_transports

    def launch(self, address: RankAddress, num_threads: int) -> LaunchedRank:
        rank = ThreadRank(address, self._extra_transports)
        self.ranks.append(rank)
        return rank


class ThisProcess(OwnProcess):
    """Shared with the test: a rank may not end, quieten or freeze it."""

    def end(self) -> None:
        pass

    def freeze_heap(self) -> None:
        pass

    def set_log_level(self, level: int) -> None:
        pass


class ThreadRank:
    def __init__(self, address: RankAddress, extra_transports: Sequence[TransportMaker]) -> None:
        self.error: BaseException | None = None
        self._address, self._extra_transports = address, extra_transports
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            run_rank(self._address, ThisProcess(), self._extra_transports)
        except (ChannelClosed, ValueError, RuntimeError) as error:  # what ends a rank's process with a message
            self.error = error

    def why_ended(self) -> str | None:
        return None if self.thread.is_alive() else f"its thread has ended: {self.error}"

    def kill(self) -> None:
        """A thread cannot be killed; what rank 0 closes ends it."""
