"""Checks the engine on a GPU against transformers, in one short script: `python -m tests.gpu.check_engine [--model FOLDER]`.

Needs torch with CUDA and transformers, no Ray, no network. Prints one line per check; the exit status is 1 when one failed, and 0 when
there is no GPU. It makes a tiny random model; `--model` names a real one to check too.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.sampling_params import SamplingParams
from tests.bench.manta_engine import sweep
from tests.engine_harness import requests_for, run

NUM_OUTPUT = 32
PROMPT_LENS = (1, 7, 16, 33, 64, 100, 3, 48)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
BFLOAT16_GAP = 0.5
"""Nats by which a token chosen in bfloat16 may be less probable than the best one, under float32."""
STEP_SIZES = [1, 8, 32, 64]
KV_BYTES = 512 * 2**20

Check = Callable[[], str]


class Checks:
    """Owns the count of failures. A check returns what to say, or raises what went wrong."""

    def __init__(self) -> None:
        self.num_failed = 0

    def run(self, name: str, check: Check) -> None:
        start_s = time.monotonic()
        try:
            said, status = check(), "ok  "
        except Exception as error:  # a failed check is what this script is there to report, and the others still run
            said, status = " ".join(f"{type(error).__name__}: {error}".split())[:300], "FAIL"
            self.num_failed += 1
        sys.stdout.write(f"{status} {name}: {said} ({time.monotonic() - start_s:.1f} s)\n")
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    options = script_parser("check_engine", __doc__, "folder of a model to check beside the tiny random one").parse_args(arguments)
    if not can_check(options.device):
        return 0
    where = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    sys.stdout.write(f"torch {torch.__version__} on {where}\n")
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder:
        models = [tiny_model(Path(folder)), *([options.model] if options.model else [])]
        for model in models:
            _check_model(checks, model, options.device)
    sys.stdout.write(f"{checks.num_failed} checks failed\n" if checks.num_failed else "all checks passed\n")
    return 1 if checks.num_failed else 0


def script_parser(name: str, description: str | None, model_help: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m tests.gpu.{name}", description=description)
    parser.add_argument("--model", type=Path, help=model_help)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script itself")
    return parser


def can_check(device: str) -> bool:
    """Whether there is such a device; if so, logging is set up for a script that prints one line a check."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write(f"nothing to check: torch {torch.__version__} sees no CUDA device\n")
        return False
    logging.basicConfig(level=logging.WARNING, format="     %(message)s", stream=sys.stdout)
    disable_progress_bar()
    return True


def tiny_model(folder: Path) -> Path:
    """A random llama of the default model's shape, two layers deep."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # so that greedy choices are not near ties
    model.save_pretrained(folder / "tiny-llama")
    return folder / "tiny-llama"


def _check_model(checks: Checks, folder: Path, device: str) -> None:
    name = folder.name
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(device).eval()
    prompts = make_prompts(int(reference.config.vocab_size))
    expected: list[list[int]] = []

    def generate() -> str:
        expected.extend(_generate(reference, prompt) for prompt in prompts)
        return f"{len(prompts)} prompts, {NUM_OUTPUT} tokens each"

    checks.run(f"{name} transformers' own generate", generate)
    for budget in (2048, 37):
        checks.run(f"{name} float32, {budget} tokens a step", lambda budget=budget: _exact(folder, device, budget, prompts, expected))
    checks.run(f"{name} float32 seeded", lambda: _seeded(folder, device, prompts))
    for backend in ("auto", "reference"):
        for block_size in (16, 256) if backend == "auto" else (16,):
            checks.run(
                f"{name} bfloat16, attention {backend}, blocks of {block_size}",
                lambda backend=backend, block_size=block_size: _close(folder, device, backend, block_size, prompts, reference),
            )
    checks.run(f"{name} bfloat16 step times", lambda: _step_times(folder, device, prompts))


def _engine(folder: Path, device: str, **settings: object) -> Engine:
    config = {"kv_cache_bytes": KV_BYTES, "max_model_len": 512, "max_num_batched_tokens": 2048, "runner": "transformers", **settings}
    return load_engine(EngineConfig(model=str(folder), device=device, **config))  # type: ignore[arg-type]


def _backend_name(engine: Engine) -> str:
    return str(getattr(engine._runner, "_eager", engine._runner)._backend.name)


def make_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in PROMPT_LENS]


@torch.inference_mode()
def _generate(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids_BT = torch.tensor([prompt], device=model.device)  # type: ignore[arg-type]
    output_BT = model.generate(  # type: ignore[operator]
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        do_sample=False,
        max_new_tokens=NUM_OUTPUT,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output_BT[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _exact(folder: Path, device: str, budget: int, prompts: list[list[int]], expected: list[list[int]]) -> str:
    """Greedy tokens equal generate's: with an empty cache, and then with every prefix cached."""
    assert expected, "there is nothing to compare with"
    engine = _engine(folder, device, dtype="float32", max_num_batched_tokens=budget, max_num_seqs=16)
    for state in ("cold", "hot"):
        results = run(engine, requests_for(prompts, GREEDY, prefix=state))
        wrong = [index for index, result in enumerate(results) if result.token_ids != expected[index]]
        assert not wrong, f"{state}: prompts {wrong} differ from generate"
    return f"equal to generate, cold and hot, attention {_backend_name(engine)}"


def _seeded(folder: Path, device: str, prompts: list[list[int]]) -> str:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_tokens=NUM_OUTPUT, ignore_eos=True)
    engine = _engine(folder, device, dtype="float32", enable_prefix_caching=False)
    batched = run(engine, requests_for(prompts, params))
    for index in (0, 3, 5):
        (alone,) = run(engine, requests_for([prompts[index]], params, seeds=[index], prefix="alone"))
        assert alone.token_ids == batched[index].token_ids, f"prompt {index} alone differs from the same in a batch"
    return "the same seed gives the same tokens alone and batched"


def _close(folder: Path, device: str, backend: str, block_size: int, prompts: list[list[int]], reference: torch.nn.Module) -> str:
    """Every token chosen in bfloat16 is nearly the best one under float32."""
    engine = _engine(folder, device, dtype="bfloat16", attention_backend=backend, block_size=block_size)
    worst = 0.0
    for prompt, result in zip(prompts, run(engine, requests_for(prompts, GREEDY)), strict=True):
        assert len(result.token_ids) == NUM_OUTPUT, f"a request ended as {result.finish_reason}: {result.error}"
        with torch.inference_mode():
            logits_TV = reference(torch.tensor([prompt + result.token_ids], device=device)).logits[0]
        logprobs_TV = logits_TV.float().log_softmax(-1)[len(prompt) - 1 : -1]
        chosen_T1 = torch.tensor(result.token_ids, device=device)[:, None]
        worst = max(worst, float((logprobs_TV.amax(-1) - logprobs_TV.gather(-1, chosen_T1)[:, 0]).max()))
    assert worst <= BFLOAT16_GAP, f"a token is {worst:.2f} nats below the best, {BFLOAT16_GAP} allowed"
    return f"chose attention {_backend_name(engine)}; worst token {worst:.3f} nats below the best"


def _step_times(folder: Path, device: str, prompts: list[list[int]]) -> str:
    engine = _engine(folder, device, dtype="bfloat16", enable_prefix_caching=False)
    rows = sweep(engine, prompts, STEP_SIZES, num_steps=30, note=lambda text: None)
    return f"attention {_backend_name(engine)}; " + ", ".join(f"{row.num_running} running {row.step_ms_p50:.2f} ms" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
