"""Checks decode steps in CUDA graphs, in one short script: `python -m tests.gpu.check_graphs [--model FOLDER]`.

Checks that a replay equals the eager run of the same step to the bit, and that tokens are as good as those of an engine without graphs.
Prints step times of both and their lower bound: the bytes of weights and KV that a step must read, over the device's copy bandwidth.
`--device cpu` tests the script itself, with a capture that only runs the step again. The exit status is 1 when a check failed, and 0
when there is no GPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvcache.tensors import bytes_per_token
from replicas.attention.step_tensors import StepTensors
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.model import rank_model
from replicas.model.cuda_graphs import GraphedRunner
from replicas.model.runner import StepResult, TransformersRunner
from tests.bench.manta_engine import StepRow, sweep
from tests.eager_capture import EagerCapture
from tests.engine_harness import requests_for, run
from tests.gpu.check_engine import BFLOAT16_GAP, GREEDY, KV_BYTES, Checks, can_check, make_prompts, script_parser, tiny_model

STEP_SIZES = [1, 8, 32, 64]
BLOCK_SIZE = 256
MAX_LEN = 512
NUM_STEPS = 30
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
NUM_COPIES = 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser("check_graphs", __doc__, "folder of a model; a tiny random one otherwise")
    options = parser.parse_args(arguments)
    if not can_check(options.device):
        return 0
    if options.device == "cpu":
        rank_model.choose_capture = lambda config, *rest: EagerCapture() if config.cuda_graphs else None  # type: ignore[assignment]
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder:
        case = _Case(options.model or tiny_model(Path(folder)), options.device)
        sys.stdout.write(f"torch {torch.__version__}, {case.where}, copies {case.bytes_per_s / 1e9:.1f} GB/s\n")
        checks.run("replays equal eager runs", case.replays_equal_eager_runs)
        checks.run("tokens with and without graphs", case.tokens_are_as_good)
        for has_graphs in (False, True):
            checks.run(
                f"step times {'with' if has_graphs else 'without'} graphs", lambda has_graphs=has_graphs: case.step_times(has_graphs)
            )
    sys.stdout.write(f"{checks.num_failed} checks failed\n" if checks.num_failed else "all checks passed\n")
    return 1 if checks.num_failed else 0


class _Case:
    """One model on one device."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self.where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self.bytes_per_s = _copied_bytes_per_s(device)

    def replays_equal_eager_runs(self) -> str:
        """Step by step, on the very inputs of the replay: prompts of many lengths, requests that end one by one."""
        engine = self._engine(has_graphs=True)
        compared = _Compared(_graphed(engine))
        engine._runner = compared
        for index, request in enumerate(requests_for(make_prompts(engine.description.vocab_size) * 2, GREEDY)):
            engine.add_request(request)
            for _ in range(index % 3):
                engine.step()
        while engine.has_work:
            engine.step()
        assert compared.sizes, "no step was replayed"
        assert not compared.num_different, f"{compared.num_different} of {len(compared.sizes)} replays differ"
        return f"{len(compared.sizes)} replays of {min(compared.sizes)} to {max(compared.sizes)} rows equal to the bit"

    def tokens_are_as_good(self) -> str:
        """Sums split differently give other last bits than an eager step of exactly these rows, so near ties may fall otherwise."""
        reference = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).to(self._device).eval()
        prompts = make_prompts(int(reference.config.vocab_size))
        requests = requests_for(prompts, GREEDY)
        found, plain = ([one.token_ids for one in run(self._engine(has_graphs=has), requests)] for has in (True, False))
        worst = max(_nats_below_best(reference, prompt, tokens) for prompt, tokens in zip(prompts, found, strict=True))
        assert worst <= BFLOAT16_GAP, f"a token is {worst:.2f} nats below the best, {BFLOAT16_GAP} allowed"
        num_equal = sum(one == other for one, other in zip(found, plain, strict=True))
        return f"{num_equal} of {len(prompts)} answers equal; worst token {worst:.3f} nats below the best of float32"

    def step_times(self, has_graphs: bool) -> str:
        engine = self._engine(has_graphs=has_graphs)
        eager = _graphed(engine)._eager if has_graphs else engine._runner
        assert isinstance(eager, TransformersRunner)
        num_weight_bytes = _read_weight_bytes(eager._model)
        per_token = bytes_per_token(eager._kv.groups, eager._kv.dtype)

        def told(row: StepRow) -> str:
            floor_ms = 1e3 * (num_weight_bytes + row.num_context_tokens * per_token) / self.bytes_per_s
            return f"{row.num_running} rows {row.step_ms_p50:.2f} ms (floor {floor_ms:.2f}, {row.step_ms_p50 / floor_ms:.1f} x)"

        rows = sweep(engine, make_prompts(engine.description.vocab_size), STEP_SIZES, num_steps=NUM_STEPS, note=lambda text: None)
        return ", ".join(map(told, rows))

    def _engine(self, *, has_graphs: bool) -> Engine:
        settings: dict[str, Any] = {"model": str(self._folder), "device": self._device, "dtype": "bfloat16", "runner": "transformers"}
        limits: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_model_len": MAX_LEN, "max_num_batched_tokens": 2048}
        engine = load_engine(
            EngineConfig(**settings, **limits, kv_cache_bytes=KV_BYTES, enable_prefix_caching=False, cuda_graphs=has_graphs)
        )
        if has_graphs:
            _graphed(engine)
        return engine


def _graphed(engine: Engine) -> GraphedRunner:
    runner = engine._runner
    assert isinstance(runner, GraphedRunner), "nothing was recorded; the warning above says why"
    return runner


@dataclass
class _Compared:
    """A graphed runner whose every replay is followed by the eager run of the same static inputs."""

    runner: GraphedRunner
    sizes: list[int] = field(default_factory=list)
    num_different: int = 0

    @torch.inference_mode()
    def forward(self, step: StepTensors) -> StepResult:
        result = self.runner.forward(step)
        logits_NV = result.logits_NV.clone()
        if result.is_graphed:
            size = next(size for size in self.runner._sizes if size >= len(logits_NV))
            again_NV = self.runner._eager.forward(self.runner._inputs.step(size)).logits_NV[: len(logits_NV)]
            self.num_different += not torch.equal(logits_NV, again_NV)
            self.sizes.append(size)
        return replace(result, logits_NV=logits_NV)


@torch.inference_mode()
def _nats_below_best(model: Any, prompt: list[int], tokens: list[int]) -> float:
    logprobs_TV = model(torch.tensor([prompt + tokens], device=model.device)).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
    chosen_T1 = torch.tensor(tokens, device=model.device)[:, None]
    return float((logprobs_TV.amax(-1) - logprobs_TV.gather(-1, chosen_T1)[:, 0]).max())


def _read_weight_bytes(model: Any) -> int:
    """Of all parameters once; of an embedding that is not the output's too a step reads a few rows only."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    sizes = {one.data_ptr(): one.nbytes for one in model.parameters()}
    if embedding.data_ptr() != output.data_ptr():
        sizes.pop(embedding.data_ptr())
    return sum(sizes.values())


def _copied_bytes_per_s(device: str) -> float:
    """Read and written ones together, at the best of several copies."""
    source = torch.zeros(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target, best_s = torch.empty_like(source), float("inf")
    for _ in range(NUM_COPIES):
        start_s = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * source.nbytes / best_s


if __name__ == "__main__":
    sys.exit(main())
