"""Requests that wait until their grammar is compiled. Free of torch."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from replicas.grammar.compiler import GrammarCompiler, GrammarError, GrammarStatistics
from replicas.grammar_spec import GrammarKind, GrammarSpec
from replicas.request import FailureCause, FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected
from replicas.sampling.grammar_mask import GrammarMask

logger = logging.getLogger(__name__)

NUM_THREADS = 3
"""So that grammars that take long do not hold up those that are compiled already. The compiler itself compiles one at a time."""
GRACE_S = 0.002
"""How long the engine waits for a new request's grammar, so that one that is known, or small, runs in the very next step."""
MAX_WAIT_S = 0.05
MAX_FORCED_CHARS = 8192
"""In longer grammars forced tokens are not looked for, but drawn one by one. The search runs between two steps and holds the interpreter's
lock: of 2,000 optional properties, it takes 47 ms. A mask is computed beside the model, and a step need not wait for it."""


class ReadyRequest(NamedTuple):
    """A request whose grammar is compiled. The mask has not seen any token."""

    request: GenerationRequest
    mask: GrammarMask


class GrammarRequests:
    """Owns requests from their arrival until their grammar is compiled, and the threads that compile.

    Every request leaves it once: ready, refused or cancelled. Used by the engine's thread, except `wake`.
    """

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`make_compiler` is called once, by a thread of this object, when the first grammar arrives or on `warm_up`; it raises ValueError
        with one line if this model's tokenizer cannot be constrained. `vocab_size` is the number of logits in a row."""
        self._make_compiler = make_compiler
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiler: GrammarCompiler | None = None
        self._error: str | None = None  # why there is no compiler
        self._making = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._changed = threading.Event()
        self._waiting: dict[RequestKey, _Job] = {}
        self._ended: list[RequestProgress] = []
        self._has_threads = False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._ended)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting

    def warm_up(self) -> None:
        """Begins to make the compiler and its vocabulary, which takes some tenths of a second, before a request needs them."""
        self._submit(_Job(None, None))

    def begin(self, request: GenerationRequest, *, max_tokens: int) -> None:
        """Begins to compile the grammar of a request with at most `max_tokens` output tokens. Raises RequestRejected if this engine is
        known to have no grammars."""
        if self._error is not None:
            raise RequestRejected(self._error)
        job = self._waiting[request.key] = _Job(request, max_tokens)
        self._submit(job)
        self.wait(GRACE_S)

    def cancel(self, key: RequestKey) -> bool:
        """Ends a waiting request; the next `collect` reports it. False if it does not wait here."""
        job = self._waiting.pop(key, None)
        if job is None:
            return False
        assert job.request is not None
        self._ended.append(RequestProgress(key=key, attempt=job.request.attempt, finish_reason=FinishReason.CANCELLED))
        return True

    def collect(self) -> tuple[list[ReadyRequest], list[RequestProgress]]:
        """Requests that have become ready, and the endings of those that were refused or cancelled."""
        self._changed.clear()
        ready: list[ReadyRequest] = []
        while True:
            try:
                job = self._done.get_nowait()
            except queue.Empty:
                break
            request = job.request
            if request is None or self._waiting.get(request.key) is not job:  # cancelled meanwhile
                continue
            del self._waiting[request.key]
            if job.mask is not None:
                ready.append(ReadyRequest(request, job.mask))
            else:
                self._ended.append(_refused(request, job.error or "the grammar was not compiled"))
        ended, self._ended = self._ended, []
        return ready, ended

    def wait(self, timeout_s: float = MAX_WAIT_S) -> None:
        """Sleeps until a request is ready or refused, or `wake` is called, `timeout_s` at most."""
        self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Ends a `wait`. Callable from any thread."""
        self._changed.set()

    def statistics(self) -> GrammarStatistics:
        return GrammarStatistics() if self._compiler is None else self._compiler.statistics()

    def close(self) -> None:
        """Ends the threads after what they are compiling; waiting requests are not reported."""
        self._waiting.clear()
        if self._has_threads:
            for _ in range(NUM_THREADS):
                self._jobs.put(None)

    def _submit(self, job: _Job) -> None:
        if not self._has_threads:
            self._has_threads = True
            for number in range(NUM_THREADS):
                threading.Thread(target=self._compile_all, name=f"grammars-{number}", daemon=True).start()
        self._jobs.put(job)

    # In the threads.

    def _compile_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._compile(job)
            except (GrammarError, _NoGrammars) as error:
                job.error = str(error)
            except Exception:
                logger.exception("a grammar could not be compiled")
                job.error = "the grammar could not be compiled; the server's log has the reason"
            self._done.put(job)
            self._changed.set()

    def _compile(self, job: _Job) -> None:
        compiler = self._made_compiler()
        if job.request is None:
            compiler.matcher(GrammarSpec(kind=GrammarKind.JSON_OBJECT))
        else:
            spec = job.request.params.grammar
            assert spec is not None, "only requests with a grammar wait here"
            matcher = compiler.matcher(spec, max_tokens=job.max_tokens)
            forces = len(spec.text) <= MAX_FORCED_CHARS
            job.mask = GrammarMask(matcher, self._vocab_size, self._eos_token_ids, forces=forces)

    def _made_compiler(self) -> GrammarCompiler:
        with self._making:
            if self._error is not None:
                raise _NoGrammars(self._error)
            if self._compiler is None:
                try:
                    self._compiler = self._make_compiler()
                except ValueError as error:
                    self._error = f"this model's answers cannot follow a grammar: {error}"
                    logger.warning("%s", self._error)
                    raise _NoGrammars(self._error) from error
            return self._compiler


class _NoGrammars(Exception):
    """This engine cannot make a compiler."""


class _Job:
    """A request on its way through a thread; without one, the thread only warms up."""

    __slots__ = ("error", "mask", "max_tokens", "request")

    def __init__(self, request: GenerationRequest | None, max_tokens: int | None) -> None:
        self.request = request
        self.max_tokens = max_tokens
        self.mask: GrammarMask | None = None
        self.error: str | None = None


def _refused(request: GenerationRequest, error: str) -> RequestProgress:
    return RequestProgress(
        key=request.key,
        attempt=request.attempt,
        finish_reason=FinishReason.FAILED,
        error=error,
        failure_cause=FailureCause.GRAMMAR_REFUSED,
    )
