"""Decode steps in graphs, recorded by an eager twin: padding, sizes, what is replayed, and tokens equal to the plain runner's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from kvcache.tensors import KVTensors
from replicas.attention.step_tensors import StepTensors
from replicas.attention.varlen_cuda import VarlenCudaAttention
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.model.cuda_graphs import DecodeShape, GraphedRunner, Replay, graphed
from replicas.model.runner import StepResult, TransformersRunner, kv_groups, probe_layers
from replicas.request import FinishReason, GenerationRequest, RequestKey
from replicas.sampling_params import SamplingParams
from replicas.scheduling.step_arrays import StepArrays
from tests.eager_capture import EagerCapture
from tests.tiny_llama import VOCAB_SIZE, save_tiny_llama
from tests.tiny_models import save_tiny_model
from tests.varlen_twin import varlen_twin

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_LEN = 64
SHAPE = DecodeShape(max_rows=11, max_context_len=MAX_LEN, block_size=BLOCK_SIZE, spare_block=40)
ASKS_FOR_VALUES = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique")


class StrictCapture:
    """Refuses work that a device could not record."""

    def capture(self, work: Callable[[], None]) -> Replay:
        with _NoValues():
            work()
        return work


class _NoValues(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        has_mask = name in ("index", "index_put_") and any(index is not None and index.dtype is torch.bool for index in args[1])
        if has_mask or name.startswith(ASKS_FOR_VALUES):
            raise RuntimeError(f"{name} asks for a value while recording")
        return func(*args, **(kwargs or {}))


class SteppingRunner:
    """Logits that tell a row's token, position and context; keeps the steps it was given, as they were then."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[Any]]] = []

    def forward(self, step: StepTensors) -> StepResult:
        names = ("token_ids_T", "slots_T", "context_lens_R", "block_tables_RM", "query_starts_R1", "logit_rows")
        self.steps.append({name: getattr(step, name).tolist() for name in names})
        rows = step.logit_rows
        logits_NV = torch.stack([step.token_ids_T[rows].float(), step.positions_T[rows].float(), torch.ones(len(rows))], dim=1)
        return StepResult(logits_NV=logits_NV)


def _decodes(contexts: list[int], *, token_ids: list[int] | None = None, rows: list[int] | None = None) -> StepTensors:
    """Requests that decode one token each, after contexts of this length, their own token included."""
    num_blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    return StepTensors.from_arrays(
        StepArrays.with_blocks(
            token_ids_T=np.array(token_ids or range(100, 100 + len(contexts)), dtype=np.int32),
            lens_R=np.ones(len(contexts), dtype=np.int32),
            context_lens_R=np.array(contexts, dtype=np.int32),
            blocks=np.arange(sum(num_blocks), dtype=np.int32) % SHAPE.spare_block,
            logit_rows_N=np.array(range(len(contexts)) if rows is None else rows, dtype=np.int32),
            block_size=BLOCK_SIZE,
        )
    )


@pytest.fixture
def stepping() -> SteppingRunner:
    return SteppingRunner()


@pytest.fixture
def runner(stepping: SteppingRunner) -> GraphedRunner:
    made = GraphedRunner(stepping, EagerCapture(), SHAPE, CPU)
    stepping.steps.clear()
    return made


def test_sizes_are_small_powers_then_multiples_of_eight_up_to_the_most() -> None:
    def sizes(max_rows: int) -> tuple[int, ...]:
        return DecodeShape(max_rows=max_rows, max_context_len=8, block_size=4, spare_block=1).sizes

    assert sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert (sizes(1), sizes(3), sizes(8), sizes(11)) == ((1,), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 11))


def test_recording_goes_from_the_largest_size_to_the_smallest(stepping: SteppingRunner) -> None:
    recorded: list[int] = []

    class Noting(EagerCapture):
        def capture(self, work: Callable[[], None]) -> Replay:
            replay = super().capture(work)
            recorded.append(len(stepping.steps[-1]["token_ids_T"]))
            return replay

    GraphedRunner(stepping, Noting(), SHAPE, CPU)
    assert recorded == [11, 8, 4, 2, 1]


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 11), (11, 11)])
def test_decodes_are_padded_to_the_next_size_and_padding_touches_the_spare_block_alone(
    runner: GraphedRunner, stepping: SteppingRunner, num_rows: int, size: int
) -> None:
    given = _decodes([1 + 7 * index % MAX_LEN for index in range(num_rows)])
    result = runner.forward(given)
    logits_RV = result.logits_NV
    assert logits_RV[:, :2].tolist() == [[100 + index, 7 * index % MAX_LEN] for index in range(num_rows)]
    (step,) = stepping.steps
    width = given.block_tables_RM.shape[1]
    assert [row[:width] for row in step["block_tables_RM"][:num_rows]] == given.block_tables_RM.tolist()
    assert step["slots_T"] == [*given.slots_T.tolist(), *[SHAPE.spare_block * BLOCK_SIZE] * (size - num_rows)]
    assert step["context_lens_R"] == [*given.context_lens_R.tolist(), *[1] * (size - num_rows)]
    assert all(set(row) == {SHAPE.spare_block} for row in step["block_tables_RM"][num_rows:])
    assert (step["query_starts_R1"], step["logit_rows"]) == (list(range(size + 1)), list(range(size)))
    assert result.is_graphed


def _with_drafts(contexts: list[int], lens: list[int]) -> StepTensors:
    """Requests whose last tokens, so many of each, are computed in this step, all with logits."""
    num_blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    return StepTensors.from_arrays(
        StepArrays.with_blocks(
            token_ids_T=np.arange(5, 5 + sum(lens), dtype=np.int32),
            lens_R=np.array(lens, dtype=np.int32),
            context_lens_R=np.array(contexts, dtype=np.int32),
            blocks=np.arange(sum(num_blocks), dtype=np.int32),
            logit_rows_N=np.arange(sum(lens), dtype=np.int32),
            block_size=BLOCK_SIZE,
        )
    )


def test_drafts_are_replayed_as_rows_of_their_own_over_the_blocks_of_their_request(runner: GraphedRunner, stepping: SteppingRunner) -> None:
    result = runner.forward(_with_drafts([6, 9], [3, 1]))
    assert result.is_graphed
    assert result.logits_NV[:, :2].tolist() == [[5, 3], [6, 4], [7, 5], [8, 8]]
    (step,) = stepping.steps
    assert step["context_lens_R"] == [4, 5, 6, 9]
    assert [row[:3] for row in step["block_tables_RM"]] == [[0, 1, 0], [0, 1, 0], [0, 1, 0], [2, 3, 4]]
    assert step["slots_T"] == [3, 4, 5, 4 * BLOCK_SIZE]


def test_a_small_step_after_a_large_one_leaves_nothing_of_it(runner: GraphedRunner, stepping: SteppingRunner) -> None:
    runner.forward(_decodes([MAX_LEN] * 4))
    runner.forward(_decodes([3, 5, 2]))
    step = stepping.steps[-1]
    assert [row[2:] for row in step["block_tables_RM"][:3]] == [[0] * (SHAPE.max_blocks - 2)] * 3
    assert step["slots_T"][3] // BLOCK_SIZE == SHAPE.spare_block


@pytest.mark.parametrize(
    "step",
    [
        _decodes([9] * 12),
        _with_drafts([20, 20], [6, 6]),
        _decodes([4, 5, 6], rows=[0, 2]),
        _decodes([MAX_LEN + 1]),
        StepTensors.from_arrays(
            StepArrays.with_blocks(
                token_ids_T=np.arange(3, dtype=np.int32),
                lens_R=np.array([2, 1], dtype=np.int32),
                context_lens_R=np.array([2, 6], dtype=np.int32),
                blocks=np.arange(3, dtype=np.int32),
                logit_rows_N=np.array([1, 2], dtype=np.int32),
                block_size=BLOCK_SIZE,
            )
        ),
    ],
    ids=["more rows than recorded", "more drafts than recorded", "a row without logits", "longer than the limit", "a prefill among them"],
)
def test_what_is_not_a_recorded_decode_step_runs_eagerly(runner: GraphedRunner, stepping: SteppingRunner, step: StepTensors) -> None:
    result = runner.forward(step)
    assert len(result.logits_NV) == len(step.logit_rows)
    assert stepping.steps[0]["token_ids_T"] == step.token_ids_T.tolist()
    assert not result.is_graphed


def test_a_replay_that_takes_no_input_is_refused(stepping: SteppingRunner, caplog: pytest.LogCaptureFixture) -> None:
    class Baked(EagerCapture):
        def capture(self, work: Callable[[], None]) -> Replay:
            work()
            return lambda: None

    assert graphed(stepping, Baked(), SHAPE, CPU) is stepping
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "deviations from those of an eager run" in caplog.text


def test_a_runner_that_asks_for_a_value_is_left_eager_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Asking(SteppingRunner):
        def forward(self, step: StepTensors) -> StepResult:
            return StepResult(logits_NV=super().forward(step).logits_NV * (1 + step.positions_T.max().item()))

    asking = Asking()
    assert graphed(asking, StrictCapture(), SHAPE, CPU) is asking
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "asks for a value" in caplog.text


@pytest.mark.parametrize("family", ["llama", "llama3-rope", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt2"])
def test_decode_steps_of_a_family_can_be_recorded_and_equal_eager_ones(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(family, tmp_path), dtype=torch.float32).eval()
    calls = probe_layers(model)
    kv = KVTensors(
        kv_groups(calls), layout=VarlenCudaAttention.layout, num_blocks=SHAPE.spare_block + 1, block_size=BLOCK_SIZE,
        dtype=torch.float32, device=CPU,
    )  # fmt: skip
    kv.fill(range(SHAPE.spare_block + 1), 0.5)
    eager = TransformersRunner(model, VarlenCudaAttention(varlen_twin), kv)
    runner = graphed(eager, StrictCapture(), SHAPE, CPU)
    assert isinstance(runner, GraphedRunner)
    step = _decodes([3, 17, 1, 40, 64], token_ids=[5, 6, 7, 8, 9])
    found = runner.forward(step).logits_NV.clone()
    torch.testing.assert_close(found, eager.forward(step).logits_NV, rtol=1e-4, atol=1e-4)
    drafted = _with_drafts([7, 20], [4, 2])
    result = runner.forward(drafted)
    assert result.is_graphed
    torch.testing.assert_close(result.logits_NV.clone(), eager.forward(drafted).logits_NV, rtol=1e-4, atol=1e-4)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_torch_threads: None) -> Callable[[bool], Engine]:
    """Engines over one tiny llama whose KV holds 40 blocks: too few for eleven long requests."""
    model = str(save_tiny_llama(tmp_path))

    def loaded(has_graphs: bool) -> Engine:
        capture = lambda config, *rest: EagerCapture() if config.cuda_graphs else None  # noqa: E731
        monkeypatch.setattr("replicas.model.rank_model.choose_capture", capture)
        per_block = BLOCK_SIZE * 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, bytes
        return load_engine(
            EngineConfig(
                model=model, dtype="float32", runner="transformers", attention_backend="reference", cuda_graphs=has_graphs,
                max_num_seqs=SHAPE.max_rows, max_num_batched_tokens=32, max_model_len=MAX_LEN, block_size=BLOCK_SIZE,
                kv_cache_bytes=(SHAPE.spare_block + has_graphs) * per_block, num_threads=1,
            )
        )  # fmt: skip

    return loaded


def _requests(random: Random) -> list[tuple[int, GenerationRequest]]:
    """With the step before which each joins."""
    requests = []
    for index in range(16):
        prompt = tuple(random.randrange(3, VOCAB_SIZE) for _ in range(random.randint(1, 40)))
        params = SamplingParams(
            temperature=random.choice([0.0, 0.9]), max_tokens=random.choice([1, 9, 30, MAX_LEN - len(prompt)]), ignore_eos=True
        )
        request = GenerationRequest(request_id=f"r{index}", prompt_ids=prompt, params=params, seed=index, priority=random.randint(0, 1))
        requests.append((random.randint(0, 40), request))
    return requests


def _run(engine: Engine, seed: int) -> tuple[dict[RequestKey, tuple[list[int], FinishReason | None]], int]:
    """Tokens and end of each request of a random schedule, and the preemptions."""
    random = Random(seed)
    requests, leaves = _requests(random), {random.randint(10, 60): index for index in range(3)}
    found: dict[RequestKey, tuple[list[int], FinishReason | None]] = {request.key: ([], None) for _, request in requests}
    number = num_preemptions = 0
    while engine.has_work or number <= max(join for join, _ in requests):
        for join, request in requests:
            if join == number:
                engine.add_request(request)
        if number in leaves:
            engine.cancel(requests[leaves[number]][1].key)
        output = engine.step()
        num_preemptions += output.num_preemptions
        for progress in output.progress:
            found[progress.key] = ([*found[progress.key][0], *progress.token_ids], progress.finish_reason)
        engine.check()
        number += 1
    return found, num_preemptions


@pytest.mark.parametrize("seed", range(4))
def test_tokens_of_a_random_schedule_equal_the_plain_runners(load: Callable[[bool], Engine], seed: int) -> None:
    plain, with_graphs = load(False), load(True)
    expected, num_preemptions = _run(plain, seed)
    found, _ = _run(with_graphs, seed)
    assert found == expected
    assert num_preemptions > 0
    ends = {end for _, end in found.values()}
    assert FinishReason.LENGTH in ends
    assert FinishReason.FAILED not in ends
    stats = with_graphs.stats()
    assert 0.5 * stats.num_steps < stats.num_graphed_steps < stats.num_steps
    assert stats.num_free_blocks == stats.num_blocks == SHAPE.spare_block


def test_cuda_graphs_on_a_cpu_have_no_effect_but_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, same_torch_threads: None
) -> None:
    model = str(save_tiny_llama(tmp_path))
    engine = load_engine(EngineConfig(model=model, cuda_graphs=True, kv_cache_bytes=1 << 20, max_num_batched_tokens=128, num_threads=1))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["cuda_graphs has no effect here: they are of CUDA, and the device is cpu"]
    assert engine.stats().num_graphed_steps == 0
