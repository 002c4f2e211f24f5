"""Hidden states that a step is asked for: those of transformers, layer for layer and position for position."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from kvcache.hashing import CacheIdentity
from kvcache.prefix_cache import BlockKeyChain
from kvcache.tensors import KVTensors
from replicas.attention.reference import ReferenceAttention
from replicas.attention.step_tensors import StepTensors
from replicas.model.native_decoder import LAYOUT, NativeDecoder, SegmentedDecoder
from replicas.model.runner import ModelRunner, TransformersRunner, kv_groups, probe_layers
from replicas.native.build import load_native_library
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import HiddenStates, ScheduledChunk, StepPlan

CONFIG = LlamaConfig(
    hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=90,
    max_position_embeddings=128,
)  # fmt: skip
SEQUENCES = ([(7 * i + 3) % 90 for i in range(21)], [(5 * i + 1) % 90 for i in range(9)])
LAYERS = (0, 1, 3, CONFIG.num_hidden_layers)


def new_model() -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), dtype=torch.float32).eval()
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)  # a norm that changes what it is given
    return model


def new_runner(kind: str) -> ModelRunner:
    model = new_model()
    calls = probe_layers(model)
    layout = ReferenceAttention.layout if kind == "transformers" else LAYOUT
    kv = KVTensors(kv_groups(calls), layout=layout, num_blocks=8, block_size=16, dtype=torch.float32, device=torch.device("cpu"))
    if kind == "transformers":
        return TransformersRunner(model, ReferenceAttention(), kv)
    decoder = {"native": NativeDecoder, "segmented": SegmentedDecoder}[kind]
    return decoder(load_native_library(), model, calls, kv)


def new_state(token_ids: list[int], first_block: int) -> RequestState:
    request = GenerationRequest(request_id="r", prompt_ids=tuple(token_ids), params=SamplingParams(), seed=0)
    state = RequestState(request, arrival_number=0, chain=BlockKeyChain(CacheIdentity(), 16), max_num_tokens=len(token_ids))
    state.block_ids = list(range(first_block, first_block + 2))
    return state


def new_step(hidden: HiddenStates | None, spans: list[tuple[int, int]]) -> StepTensors:
    """A step with these spans of the two sequences; logits are wanted of each one's last token."""
    chunks = []
    for index, (start, end) in enumerate(spans):
        state = new_state(SEQUENCES[index], 2 * index)
        chunks.append(ScheduledChunk(state=state, start=start, num_tokens=end - start, is_prefill=True, logits=range(end - 1, end)))
    return StepTensors.of(StepPlan(chunks=tuple(chunks), hidden=hidden), 16)


@pytest.fixture(scope="module")
def expected() -> Any:
    """For each sequence, hidden states [layers + 1, T, H] as transformers itself gives them, and its logits [T, V]."""
    model = new_model()
    with torch.inference_mode():
        outputs = [model(input_ids=torch.tensor([ids]), output_hidden_states=True) for ids in SEQUENCES]
    return [(torch.cat(output.hidden_states), output.logits[0]) for output in outputs]


@pytest.mark.parametrize("kind", ["transformers", "native", "segmented"])
def test_hidden_states_of_chosen_layers_and_positions_are_those_of_transformers(kind: str, expected: Any) -> None:
    runner = new_runner(kind)
    runner.forward(new_step(None, [(0, 12), (0, 4)]))
    positions = (range(13, 21), range(4, 9))
    result = runner.forward(new_step(HiddenStates(layers=LAYERS, positions=positions), [(12, 21), (4, 9)]))
    assert result.hidden_LKW is not None
    assert result.hidden_LKW.dtype is torch.float32
    wanted_LKH = torch.cat([states[list(LAYERS), span.start : span.stop] for (states, _), span in zip(expected, positions, strict=True)], 1)
    torch.testing.assert_close(result.hidden_LKW, wanted_LKH, rtol=1e-4, atol=1e-5)
    for row, (_, logits_TV) in enumerate(expected):
        torch.testing.assert_close(result.logits_NV[row], logits_TV[-1], rtol=1e-4, atol=1e-5)
    distances = [(result.hidden_LKW[i] - wanted_LKH[j]).abs().mean() for i in range(4) for j in range(4) if i != j]
    assert min(distances) > 1e-3, "the layers are too alike: an index that is off by one would not be found"


@pytest.mark.parametrize("kind", ["native", "segmented"])
def test_asking_for_hidden_states_leaves_the_logits_as_they_are_to_the_bit(kind: str) -> None:
    plain, asked = new_runner(kind), new_runner(kind)
    hidden = HiddenStates(layers=(2,), positions=(range(21), range(9)))
    spans = [(0, 21), (0, 9)]
    without = plain.forward(new_step(None, spans))
    assert without.hidden_LKW is None
    assert torch.equal(asked.forward(new_step(hidden, spans)).logits_NV, without.logits_NV)
