"""Sends the log lines of Manta's packages, in a process that Ray started, to Serve's log."""

from __future__ import annotations

import copy
import logging
import sys

PACKAGES = ("cluster", "router", "replicas", "kvcache", "manta")
SERVE_LOGGER = "ray.serve"


def start_logging(level: str) -> None:
    """Sends Manta's log lines to Serve's logger, which writes them with the time to the replica's log file; without Serve, to stderr.

    Calling it again only sets the level.
    """
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not logger.handlers:
            serve = logging.getLogger(SERVE_LOGGER)
            handler = _ToServe(serve) if serve.handlers else logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.propagate = False


class _ToServe(logging.Handler):
    """Passes records straight to Serve's handlers. Standard error leads there too, but each line then costs a stack walk: 1 ms."""

    def __init__(self, serve: logging.Logger) -> None:
        super().__init__()
        self._serve = serve

    def emit(self, record: logging.LogRecord) -> None:
        line = copy.copy(record)
        try:
            line.msg, line.args, line.exc_info, line.exc_text = self.format(record), None, None, None
        except Exception:  # noqa: BLE001 - as in logging's own handlers: a bad line must not fail its writer
            self.handleError(record)
            return
        self._serve.callHandlers(line)
