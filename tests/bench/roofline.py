"""The maximum tokens per second that this machine's measured bandwidth and matmul rate allow: the roofline (Williams et al., 2009).

Decoding a batch reads every weight once per step, so its rate is at most bandwidth / weight bytes times the batch, and at most the
matmul rate over the operations of one token. KV and activations are left out, so both bounds are slightly too high to be reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

QUANTIZED_BITS = {"int8": 9.0, "int4": 5.0}
"""Of a quantized weight: its own, and the scale and least of 16 bits each that 32 weights share."""
_MATMUL_ROWS = 2048
_NUM_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What a decoder's linears cost, the language model head among them."""

    num_weights: int
    """Weights that a decode step reads: all linears, a tied head as well."""
    num_head_weights: int
    num_layers: int
    attention_width: int
    """Query heads times head dim."""

    @property
    def flops_per_token(self) -> int:
        """Of a decoded token, a multiplication and an addition a weight; attention, which grows with the context, left out."""
        return 2 * self.num_weights

    def prefill_flops(self, num_tokens: int) -> int:
        """Of one prompt: linears of every token, the head of the last, and scores and sums of causal attention."""
        linears = 2 * (self.num_weights - self.num_head_weights) * num_tokens + 2 * self.num_head_weights
        return linears + 4 * self.num_layers * self.attention_width * (num_tokens * (num_tokens + 1) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One model with weights of one type on one machine."""

    weight_bytes: int
    flops_per_token: int
    bandwidth_bytes_per_s: float
    """Streaming as many bytes as the weights have, with the engine's threads."""
    matmul_flops_per_s: float
    """torch's matmul of many rows, in the type that the engine multiplies in, with the engine's threads. For quantized weights it
    is that of bfloat16 too: two passes of bytes take as long."""

    def bandwidth_bound(self, batch_size: int) -> float:
        """Tokens a second if reading the weights were all of a step."""
        return batch_size * self.bandwidth_bytes_per_s / self.weight_bytes

    @property
    def compute_bound(self) -> float:
        """Tokens a second if multiplying were all of a step."""
        return self.matmul_flops_per_s / self.flops_per_token

    def bound(self, batch_size: int) -> float:
        return min(self.bandwidth_bound(batch_size), self.compute_bound)


def model_cost(model: str) -> ModelCost:
    """From the model's configuration alone; no weights are loaded. `model` is a folder or a Hugging Face id."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    sizes = {name: part.weight.numel() for name, part in skeleton.named_modules() if isinstance(part, torch.nn.Linear)}
    text = config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelCost(
        num_weights=sum(sizes.values()),
        num_head_weights=skeleton.get_output_embeddings().weight.numel(),
        num_layers=text.num_hidden_layers,
        attention_width=text.num_attention_heads * head_dim,
    )


def measure_roofline(cost: ModelCost, weight_bits: float, *, rounds_activations: bool = False) -> Roofline:
    """Takes some seconds, and memory as large as the weights. Uses torch's threads as they are set. `rounds_activations`: the engine
    multiplies bfloat16 by bfloat16, or bytes in two passes, not float32 by float32."""
    weight_bytes = round(cost.num_weights * weight_bits / 8)
    return Roofline(
        weight_bytes=weight_bytes,
        flops_per_token=cost.flops_per_token,
        bandwidth_bytes_per_s=weight_bytes / _stream_s(weight_bytes),
        matmul_flops_per_s=_matmul_flops_per_s(rounds_activations),
    )


def _stream_s(num_bytes: int) -> float:
    """Least seconds for reading `num_bytes` once: the better of a sum and a matrix-vector product, both of which only read."""
    import torch

    columns = 4096
    data_RC = torch.ones(-(-num_bytes // 4 // columns), columns)
    vector_C = torch.ones(columns)
    whole_s = min(_least_s(data_RC.sum), _least_s(lambda: torch.mv(data_RC, vector_C)))
    return whole_s * num_bytes / (4 * data_RC.numel())


def _matmul_flops_per_s(is_bfloat16: bool) -> float:
    import torch

    dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    a, b = torch.rand(_MATMUL_ROWS, 1024, dtype=dtype), torch.rand(1024, 1024, dtype=dtype)
    return 2 * _MATMUL_ROWS * 1024 * 1024 / _least_s(lambda: torch.mm(a, b))


def _least_s(work: Callable[[], object]) -> float:
    """Of several runs, as a bound wants the machine's best; the first pays for page faults and is one of them."""
    times_s = []
    for _ in range(_NUM_TRIES):
        start_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
