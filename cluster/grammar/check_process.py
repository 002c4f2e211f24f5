"""A process in which grammars are checked, so that one that is too complex costs a process and not the gateway.

`python -m cluster.grammar.check_process FD` says on the socket FD that it is ready, with an empty message, and then answers one check
after the other until the other end closes. A check takes too much processor time or memory ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from functools import partial
from typing import Any

from replicas.grammar.big_stack import BigStackThread
from replicas.grammar.checking.checks import GrammarChecker
from replicas.grammar.compiler import GrammarError
from replicas.grammar_spec import GrammarKind, GrammarSpec

MAX_CPU_S = 2
"""Processor seconds of one check; the system counts whole ones."""
MAX_BYTES = 1 << 30
"""Address space of the process, a big stack (256 MiB, mostly never touched) included."""
NICENESS = 10
"""Below the engines of the same machine: a grammar that is too complex must not slow anybody's answer."""
_LENGTH_BYTES = 4


def main() -> None:
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    line = socket.socket(fileno=int(sys.argv[1]))
    thread = BigStackThread("grammar-check")
    checker = GrammarChecker()
    line.sendall(framed({}))  # ready
    while (asked := _received(line)) is not None:
        _limit_cpu()
        line.sendall(framed(thread.call(partial(answer, checker, asked))))


def answer(checker: GrammarChecker, question: dict[str, Any]) -> dict[str, Any]:
    """What is left of the grammar and what was dropped of it, or the error."""
    spec = GrammarSpec(
        kind=GrammarKind(question["kind"]),
        text=question["text"],
        is_compact=question["is_compact"],
        begins_after=question["begins_after"],
    )
    try:
        found = checker.checked(spec, drops_unsupported=question["drops_unsupported"])
    except GrammarError as error:
        return {"error": str(error)}
    changed = {} if found.spec == spec else {"kind": found.spec.kind.value, "text": found.spec.text}
    return {"dropped": found.dropped, **changed}


def framed(message: dict[str, Any]) -> bytes:
    """JSON behind its length."""
    raw = json.dumps(message).encode()
    return len(raw).to_bytes(_LENGTH_BYTES, "little") + raw


def _received(line: socket.socket) -> dict[str, Any] | None:
    head = _exactly(line, _LENGTH_BYTES)
    if head is None:
        return None
    raw = _exactly(line, int.from_bytes(head, "little"))
    message: dict[str, Any] | None = None if raw is None else json.loads(raw)
    return message


def _exactly(line: socket.socket, size: int) -> bytes | None:
    """None: the other end closed."""
    parts = bytearray()
    while len(parts) < size:
        part = line.recv(min(1 << 20, size - len(parts)))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _limit_cpu() -> None:
    """The limit counts from the start of the process, so each check moves it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + MAX_CPU_S, hard))


if __name__ == "__main__":
    main()
