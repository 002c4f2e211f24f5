"""Rows of a verification have the bits of steps of one row: what makes drafts exact. In the default model's shapes, on each variant."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvcache.hashing import CacheIdentity
from kvcache.prefix_cache import BlockKeyChain
from kvcache.tensors import KVTensors
from replicas.attention.step_tensors import StepTensors
from replicas.model.native_decoder import LAYOUT, NativeDecoder
from replicas.model.runner import kv_groups, probe_layers
from replicas.native.build import load_native_library
from replicas.native.isa import EMULATED, cpu_flags, runnable
from replicas.native.thread_team import ThreadTeam
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3,
    head_dim=64, max_position_embeddings=128,
)  # fmt: skip
SMALL = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 3, "num_key_value_heads": 1}
"""For the emulated variant, which is a hundred times slower than the one that it stands for."""
BLOCK_SIZE = 16
MAX_ROWS = 17
FORMATS: dict[str, tuple[torch.dtype, Any]] = {
    "bfloat16": (torch.bfloat16, None),
    "float32": (torch.float32, None),
    "int8": (torch.bfloat16, "int8"),
    "int4": (torch.bfloat16, "int4"),
}

pytestmark = pytest.mark.usefixtures("same_torch_threads")


@pytest.fixture(scope="module", params=[*runnable(cpu_flags()), EMULATED], ids=lambda isa: isa.name)
def variant(request: pytest.FixtureRequest) -> tuple[ctypes.CDLL, LlamaConfig]:
    """The kernels, and the model that they run."""
    config = LlamaConfig(**{**CONFIG.to_dict(), **SMALL}) if request.param is EMULATED else CONFIG
    return load_native_library(variants=[request.param]), config


def state_of(num_tokens: int, first_block: int, seed: int) -> RequestState:
    ids = torch.randint(0, CONFIG.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    request = GenerationRequest(request_id=f"r{seed}", prompt_ids=tuple(ids), params=SamplingParams(), seed=0)
    state = RequestState(request, arrival_number=0, chain=BlockKeyChain(CacheIdentity(), BLOCK_SIZE), max_num_tokens=num_tokens)
    state.block_ids = list(range(first_block, first_block + -(-num_tokens // BLOCK_SIZE)))
    return state


def step(*chunks: tuple[RequestState, int, int]) -> StepTensors:
    """Chunks of (request, start, number of tokens), all with logits."""
    planned = [
        ScheduledChunk(state=state, start=start, num_tokens=num, is_prefill=False, logits=range(start, start + num))
        for state, start, num in chunks
    ]
    return StepTensors.of(StepPlan(chunks=tuple(planned)), BLOCK_SIZE)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_1_to_17_of_a_chunk_equal_one_at_a_time(variant: tuple[ctypes.CDLL, LlamaConfig], name: str) -> None:
    library, config = variant
    dtype, quantization = FORMATS[name]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    calls = probe_layers(model)
    kv = KVTensors(kv_groups(calls), layout=LAYOUT, num_blocks=12, block_size=BLOCK_SIZE, dtype=dtype, device=torch.device("cpu"))
    kv.fill(range(12), 0.25)
    team = ThreadTeam(library, 3)  # loops over many rows are shared, loops over few are not
    decoder = NativeDecoder(library, model, calls, kv, quantization=quantization, team=team)
    verified, neighbour = state_of(2 * BLOCK_SIZE - 3 + MAX_ROWS, 0, 1), state_of(40, 6, 2)
    start = len(verified.token_ids) - MAX_ROWS  # three slots before a block ends: the rows go on in the next
    decoder.forward(step((verified, 0, start), (neighbour, 0, 39)))
    alone_NV = torch.cat([decoder.forward(step((verified, start + row, 1))).logits_NV.clone() for row in range(MAX_ROWS)])
    keys = [tensor.clone() for tensor in kv.layer(1)]
    for num_rows in range(1, MAX_ROWS + 1):
        together_NV = decoder.forward(step((verified, start, num_rows))).logits_NV
        assert torch.equal(together_NV, alone_NV[:num_rows]), num_rows
        beside_NV = decoder.forward(step((neighbour, 39, 1), (verified, start, num_rows))).logits_NV
        assert torch.equal(beside_NV[1:], alone_NV[:num_rows]), num_rows
    assert all(torch.equal(one[:6], other[:6]) for one, other in zip(kv.layer(1), keys, strict=True)), "keys and values differ"
    assert len(alone_NV.unique(dim=0)) == MAX_ROWS, "rows that are all alike prove nothing"
