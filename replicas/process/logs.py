"""Where log lines of Manta's own packages go in a process that Ray started."""

from __future__ import annotations

import copy
import logging
import sys

PACKAGES = ("cluster", "router", "replicas", "kvcache", "manta")
SERVE_LOGGER = "ray.serve"


def start_logging(level: str) -> None:
    """Sends Manta's loggers to Serve's, which keeps them, with the time, in the replica's log file; to standard error elsewhere.

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
    """Standard error leads to Serve's logger too, but there each line costs the walk of a whole stack: a millisecond."""

    def __init__(self, serve: logging.Logger) -> None:
        super().__init__()
        self._serve = serve

    def emit(self, record: logging.LogRecord) -> None:
        line = copy.copy(record)
        try:
            line.msg, line.args, line.exc_info, line.exc_text = self.format(record), None, None, None
        except Exception:  # noqa: BLE001 - as in logging's own handlers: a bad line must not fail whoever writes it
            self.handleError(record)
            return
        self._serve.callHandlers(line)
