"""The roofline and what a model costs, against hand calculations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from replicas.native.packing import Element, pack
from tests.bench.roofline import QUANTIZED_BITS, ModelCost, Roofline, measure_roofline, model_cost

ROOF = Roofline(weight_bytes=100, flops_per_token=200, bandwidth_bytes_per_s=1000.0, matmul_flops_per_s=10_000.0)


@pytest.mark.parametrize(("batch_size", "tokens_per_s"), [(1, 10.0), (4, 40.0), (5, 50.0), (64, 50.0)])
def test_bound_bends_where_compute_takes_as_long_as_reading(batch_size: int, tokens_per_s: float) -> None:
    assert ROOF.bound(batch_size) == tokens_per_s


def test_prefill_flops_count_linears_one_head_and_causal_attention() -> None:
    cost = ModelCost(num_weights=100, num_head_weights=40, num_layers=2, attention_width=8)
    # 3 tokens through 60 weights, one through 40; 1 + 2 + 3 pairs, each 8 multiply-adds for the score and 8 for the sum, in 2 layers.
    assert cost.prefill_flops(3) == 2 * 60 * 3 + 2 * 40 + 2 * (2 * 8 + 2 * 8) * 6
    assert cost.flops_per_token == 200


def test_model_cost_of_a_tied_llama_counts_its_linears(tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=32,
        tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    layer = 16 * 16 + 2 * (16 * 8) + 16 * 16 + 3 * (16 * 24)  # q, k and v, o, and the three of the MLP
    assert model_cost(str(tmp_path)) == ModelCost(
        num_weights=2 * layer + 16 * 32, num_head_weights=16 * 32, num_layers=2, attention_width=16
    )


def test_measure_roofline_counts_the_bytes_of_its_weights() -> None:
    roof = measure_roofline(ModelCost(num_weights=10_000, num_head_weights=0, num_layers=1, attention_width=8), QUANTIZED_BITS["int4"])
    assert roof.weight_bytes == 6_250
    assert roof.bandwidth_bytes_per_s > 0
    assert roof.matmul_flops_per_s > 0


def test_quantized_bits_are_what_packed_weights_take() -> None:
    for name, bits in QUANTIZED_BITS.items():
        packed = pack(torch.randn(32, 64), Element[name.upper()])
        assert packed.panels_PW.numel() * 32 == bits * 32 * 64
