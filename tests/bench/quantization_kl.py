"""Measures the loss of quality by quantization: `python -m tests.bench.quantization_kl [--model FOLDER] [--prompts N]`.

Kullback-Leibler divergence of the quantized model's next-token distributions from those of the same engine with the checkpoint's own
weights, over every token of prompts in several languages and code, and the share of tokens where both have the same most probable one.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import statistics
from collections.abc import Sequence
from typing import Any, get_args

import torch

from replicas.attention.step_tensors import StepTensors
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig, Quantization
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan
from replicas.text.tokenizer import Tokenizer
from tests.prompts import mixed_prompts

MAX_TOKENS = 256
"""Of a prompt; the rest is left out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Of one quantization, over all tokens, in nats."""

    mean: float
    median: float
    p99: float
    same_best: float
    """Share of tokens after which the most probable next token is the same."""
    num_tokens: int


def divergence(exact: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> Divergence:
    """Of log-probabilities [T, V] for each prompt."""
    kl = [(p_TV.exp() * (p_TV - q_TV)).sum(-1, dtype=torch.float64) for p_TV, q_TV in zip(exact, other, strict=True)]
    same = [(p_TV.argmax(-1) == q_TV.argmax(-1)).double() for p_TV, q_TV in zip(exact, other, strict=True)]
    values = sorted(torch.cat(kl).tolist())
    return Divergence(
        mean=statistics.fmean(values),
        median=statistics.median(values),
        p99=values[int(0.99 * (len(values) - 1))],
        same_best=float(torch.cat(same).mean()),
        num_tokens=len(values),
    )


def logprobs(model: str | None, prompts: Sequence[Sequence[int]], quantization: Quantization | None) -> list[torch.Tensor]:
    """Of every position of each prompt, by the native runner, float32 [T, V]."""
    tokens = max(map(len, prompts))
    engine = load_engine(
        EngineConfig(model=model, runner="native", quantization=quantization, max_model_len=tokens + 1, max_num_batched_tokens=tokens)
    )
    block_size = engine.description.block_size
    found = []
    for prompt in prompts:
        state: Any = object.__new__(RequestState)  # a step needs no more of it than tokens and blocks
        state.token_ids, state.block_ids = list(prompt), list(range(-(-len(prompt) // block_size)))
        chunk = ScheduledChunk(state=state, start=0, num_tokens=len(prompt), is_prefill=True, logits=range(len(prompt)))
        step = StepTensors.of(StepPlan(chunks=(chunk,)), block_size)
        found.append(engine._runner.forward(step).logits_NV.log_softmax(-1))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quantization_kl", description=__doc__)
    parser.add_argument("--model", help="a folder or a Hugging Face id; the default model otherwise")
    parser.add_argument("--prompts", type=int, default=5, help="of each of the four kinds")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    described = load_engine(EngineConfig(model=options.model)).description
    prompts = [ids[:MAX_TOKENS] for ids in mixed_prompts(Tokenizer.load(described.tokenizer_source), options.prompts)]
    exact = logprobs(options.model, prompts, None)
    print(f"{len(prompts)} prompts, {sum(map(len, prompts))} tokens; in nats, from {described.dtype}")
    for quantization in get_args(Quantization):
        found = divergence(exact, logprobs(options.model, prompts, quantization))
        print(
            f"{quantization}: KL mean {found.mean:.5f}, median {found.median:.5f}, p99 {found.p99:.4f}; "
            f"the same best token {found.same_best:.1%}"
        )


if __name__ == "__main__":
    main()
