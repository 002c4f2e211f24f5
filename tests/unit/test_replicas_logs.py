import io
import logging
from collections.abc import Iterator

import pytest

from replicas.process.logs import PACKAGES, SERVE_LOGGER, start_logging


@pytest.fixture(autouse=True)
def bare_loggers() -> Iterator[None]:
    """Loggers as in a new process, and as they were when the test has ended."""
    loggers = [logging.getLogger(name) for name in (*PACKAGES, SERVE_LOGGER)]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [], True  # pytest adds a handler of its own to loggers that do not propagate
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def written(to: logging.Logger) -> io.StringIO:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("serve %(levelname)s -- %(message)s"))
    to.addHandler(handler)
    return text


def test_start_logging_under_serve_lines_reach_its_logger_once_with_name_and_error() -> None:
    text = written(logging.getLogger(SERVE_LOGGER))
    start_logging("INFO")
    start_logging("INFO")
    logging.getLogger("cluster.gateway").info("%d requests", 3)
    logging.getLogger("router").debug("unseen")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("replicas").exception("a step failed")
    first, second, *trace = text.getvalue().splitlines()
    assert first == "serve INFO -- INFO cluster.gateway: 3 requests"
    assert second == "serve ERROR -- ERROR replicas: a step failed"
    assert trace[-1] == "ValueError: broken"
    assert text.getvalue().count("Traceback") == 1


def test_start_logging_under_serve_bad_line_does_not_fail_whoever_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = written(logging.getLogger(SERVE_LOGGER))
    start_logging("INFO")
    logging.getLogger("cluster").info("%d requests", "many")
    assert not text.getvalue()
    assert "--- Logging error ---" in capsys.readouterr().err


def test_start_logging_elsewhere_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("WARNING")
    logging.getLogger("kvcache").warning("full")
    assert capsys.readouterr().err == "WARNING kvcache: full\n"
