"""Where log lines of Manta's own packages go in a process that Ray started."""

from __future__ import annotations

import logging
import sys

PACKAGES = ("cluster", "router", "replicas", "kvcache", "manta")


def start_logging(level: str) -> None:
    """Sends Manta's loggers to standard error, which Serve keeps, with the time, in the replica's log file.

    Calling it again only sets the level.
    """
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.propagate = False
