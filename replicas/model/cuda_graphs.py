"""Decode steps as CUDA graphs: recorded once per number of rows, replayed with one call. Letters: B rows, M blocks, V vocabulary."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from replicas.attention.step_tensors import StepTensors
from replicas.model.runner import ModelRunner, StepResult
from replicas.scheduling.step_arrays import StepArrays

logger = logging.getLogger(__name__)

ROWS_APART = 8
"""Difference between two sizes of graphs, from this size on."""
NUM_WARMUPS = 2
"""Runs before a recording: libraries choose kernels and allocate workspaces in the first run, which must not be recorded."""
GRAPHS_PER_LOG_LINE = 8
TOLERANCE = 1e-2
"""Largest difference allowed between logits of a replay and of an eager run, in standard deviations. Both run the same kernels."""

Replay = Callable[[], None]


class GraphsRefused(Exception):
    """A replay's logits differ from those of the eager runner."""


class GraphCapture(Protocol):
    """Records work on a device, to repeat it without Python and without single kernel launches."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """A call that repeats the work on the same memory, with the values there at that time. Raises RuntimeError when `work` does
        something that cannot be recorded, such as reading a value back from the device."""
        ...


class CudaCapture:
    """Owns the stream of all recordings and the memory that they share, because only one graph runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            # The outer context restores the caller's stream when a recording fails; torch's own context does not.
            with torch.cuda.stream(self._stream):
                for _ in range(NUM_WARMUPS):
                    work()
                # Other threads may use the device meanwhile: this mode only forbids unrecordable calls of this thread.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    work()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """The largest possible decode step, and the block that padding rows write to."""

    max_rows: int
    max_context_len: int
    block_size: int
    spare_block: int
    """A block of the KV tensors that is never given to a request."""

    @property
    def max_blocks(self) -> int:
        return -(-self.max_context_len // self.block_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows that get a graph: 1, 2, 4, then multiples of 8, and `max_rows`."""
        steps = (1, 2, 4, *range(ROWS_APART, self.max_rows, ROWS_APART))
        return (*(size for size in steps if size < self.max_rows), self.max_rows)


class StaticInputs:
    """Owns the inputs of decode steps at fixed addresses, in one piece of memory, so that each step needs one copy.

    A padding row is a sequence of one token whose only block is the spare one. It reads only what it wrote itself.
    """

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self._shape = shape
        num_rows, num_blocks = shape.max_rows, shape.max_blocks
        self._num_head_bytes = 8 * 3 * num_rows + 4 * num_rows  # the bytes before the block tables
        num_bytes = self._num_head_bytes + 4 * num_rows * num_blocks
        # A copy from pinned memory waits for nothing else on the device.
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.empty_like(self._host, device=device, pin_memory=False)
        self._host_views, self._device_views = (_Views(memory, num_rows, num_blocks) for memory in (self._host, self._device))
        self._starts_B1 = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._rows_B = torch.arange(num_rows, device=device)
        self.fill_padding(0, num_rows)
        self._copy(num_rows)

    def step(self, num_rows: int) -> StepTensors:
        """A decode step of `num_rows` rows over this memory, with the values of the last `fill`."""
        views = self._device_views
        ones = np.ones(num_rows, dtype=np.int32)
        return StepTensors(
            token_ids_T=views.longs_3B[0, :num_rows],
            positions_T=views.longs_3B[1, :num_rows],
            slots_T=views.longs_3B[2, :num_rows],
            query_starts_R1=self._starts_B1[: num_rows + 1],
            context_lens_R=views.context_lens_B[:num_rows],
            block_tables_RM=views.block_tables_BM[:num_rows],
            logit_rows=self._rows_B[:num_rows],
            max_query_len=1,
            max_context_len=self._shape.max_context_len,
            arrays=StepArrays.with_blocks(
                token_ids_T=ones - 1,
                lens_R=ones,
                context_lens_R=ones,
                blocks=ones * np.int32(self._shape.spare_block),
                logit_rows_N=np.arange(num_rows, dtype=np.int32),
                block_size=self._shape.block_size,
            ),
        )

    def fill(self, step: StepTensors, num_rows: int) -> None:
        """Copies in a step on the host with at most `num_rows` tokens, each as a row of its own, and pads it to `num_rows`.

        A token and the drafts behind it become several sequences of one token over the same blocks. They find each other's keys and
        values, because each layer writes those of all rows before its attention reads any.
        """
        views, num_used, num_blocks = self._host_views, len(step.token_ids_T), step.block_tables_RM.shape[1]
        views.longs_3B[0, :num_used] = step.token_ids_T
        views.longs_3B[1, :num_used] = step.positions_T
        views.longs_3B[2, :num_used] = step.slots_T
        views.context_lens_B[:num_used] = step.positions_T + 1
        tables_RM = step.block_tables_RM
        if len(tables_RM) < num_used:
            tables_RM = tables_RM.repeat_interleave(torch.from_numpy(step.arrays.lens_R).long(), dim=0)
        views.block_tables_BM[:num_used, :num_blocks] = tables_RM
        views.block_tables_BM[:num_used, num_blocks:] = 0
        self.fill_padding(num_used, num_rows)
        self._copy(num_rows)

    def fill_padding(self, start: int, stop: int, token_id: int = 0) -> None:
        """Writes padding to rows `start .. stop - 1` on the host; the device gets it with the next copy."""
        views, spare = self._host_views, self._shape.spare_block
        views.longs_3B[0, start:stop] = token_id
        views.longs_3B[1, start:stop] = 0
        views.longs_3B[2, start:stop] = spare * self._shape.block_size
        views.context_lens_B[start:stop] = 1
        views.block_tables_BM[start:stop] = spare

    def fill_alike(self, token_id: int, num_rows: int) -> None:
        """Makes a step of padding rows only."""
        self.fill_padding(0, num_rows, token_id)
        self._copy(num_rows)

    def _copy(self, num_rows: int) -> None:
        num_bytes = self._num_head_bytes + 4 * num_rows * self._shape.max_blocks
        self._device[:num_bytes].copy_(self._host[:num_bytes])  # blocking: the next step writes to the same host memory


class _Views:
    """Views of one piece of memory as the inputs of a step."""

    def __init__(self, memory: torch.Tensor, num_rows: int, num_blocks: int) -> None:
        num_long_bytes = 8 * 3 * num_rows
        self.longs_3B = memory[:num_long_bytes].view(torch.int64).view(3, num_rows)
        """Token ids, positions, slots."""
        ints = memory[num_long_bytes:].view(torch.int32)
        self.context_lens_B = ints[:num_rows]
        self.block_tables_BM = ints[num_rows:].view(num_rows, num_blocks)


class GraphedRunner:
    """Replays steps in which every token has logits, as decodes and their drafts have, padded to the next recorded size; the eager
    runner runs all other steps."""

    def __init__(self, eager: ModelRunner, capture: GraphCapture, shape: DecodeShape, device: torch.device) -> None:
        """Records all sizes, the largest first, so that smaller ones reuse its memory. Raises RuntimeError when recording fails, and
        GraphsRefused when a replay differs from an eager run."""
        self._eager, self._shape = eager, shape
        self._sizes = shape.sizes
        start_s = time.monotonic()
        with torch.inference_mode():
            self._inputs = StaticInputs(shape, device)
            self._logits_BV = torch.empty_like(eager.forward(self._inputs.step(shape.max_rows)).logits_NV)
            logger.info("recording CUDA graphs of 1 to %d rows, the largest of %d first", shape.max_rows, len(self._sizes))
            self._replays: dict[int, Replay] = {}  # rows -> replay
            for size in reversed(self._sizes):
                self._replays[size] = capture.capture(self._work(size))
                self._check(size)
                if len(self._replays) % GRAPHS_PER_LOG_LINE == 0:
                    logger.info("%d of %d CUDA graphs recorded", len(self._replays), len(self._sizes))
        logger.info(
            "CUDA graphs: steps of up to %d decodes are replayed, %d sizes, recorded in %.1f s",
            shape.max_rows, len(self._sizes), time.monotonic() - start_s,
        )  # fmt: skip

    @torch.inference_mode()
    def forward(self, step: StepTensors) -> StepResult:
        if not self._is_graphed(step):
            return self._eager.forward(step)
        num_rows = len(step.token_ids_T)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        self._inputs.fill(step, size)
        self._replays[size]()
        return StepResult(logits_NV=self._logits_BV[:num_rows], is_graphed=True)

    def _is_graphed(self, step: StepTensors) -> bool:
        arrays, shape = step.arrays, self._shape
        num_rows = len(arrays.token_ids_T)
        return (
            arrays.hidden is None
            and num_rows <= shape.max_rows
            and len(arrays.logit_rows_N) == num_rows
            and step.max_context_len <= shape.max_context_len
        )

    def _work(self, size: int) -> Callable[[], None]:
        step, logits_BV = self._inputs.step(size), self._logits_BV[:size]

        def work() -> None:
            logits_BV.copy_(self._eager.forward(step).logits_NV)

        return work

    def _check(self, size: int) -> None:
        """Compares a replay with an eager run, with another token than the recorded one: so a replay that ignores its input is found."""
        self._inputs.fill_alike(1, size)
        expected_BV = self._eager.forward(self._inputs.step(size)).logits_NV
        self._replays[size]()
        difference = float((self._logits_BV[:size] - expected_BV).abs().max() / expected_BV.std())
        if not difference <= TOLERANCE:
            raise GraphsRefused(f"with {size} rows a replay's logits differ by {difference:.2g} deviations from those of an eager run")


def graphed(eager: ModelRunner, capture: GraphCapture, shape: DecodeShape, device: torch.device) -> ModelRunner:
    """A runner that replays graphs where it can; `eager` itself, with a warning that gives the reason, when recording fails."""
    try:
        return GraphedRunner(eager, capture, shape, device)
    except (RuntimeError, MemoryError, GraphsRefused) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        logger.warning("cuda_graphs: decode steps are launched one kernel at a time, because recording them failed (%s)", reason)
        return eager
