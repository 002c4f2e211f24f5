"""EAGLE-3 heads as the package speculators trains and saves them: its logits are ours, draft by draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.tensors import KVTensors
from replicas.attention.reference import ReferenceAttention
from replicas.sampling.sampler import Sampler
from replicas.scheduling.request_state import RequestState
from replicas.scheduling.step_plan import ScheduledChunk, StepPlan
from replicas.speculation.drafting.draft_draws import DraftDraws
from replicas.speculation.drafting.eagle import EagleProposer
from replicas.speculation.heads.eagle_files import read_eagle
from replicas.speculation.heads.eagle_layer import EagleLayer, kv_group
from replicas.speculation.proposer import ObservedStep
from tests.unit.drafting_heads import BLOCK_SIZE, head_target, random_tensors, request_state, write_head
from tests.unit.eagle_heads import IDS, LAYERS, V, W, eagle3_tensors, speculators_config

pytest.importorskip("speculators", reason="waits for the package speculators (0.9), which is no requirement of this repository")

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # speculators 0.9 with transformers 5.24

NUM_STEPS, NUM_TOKENS, AT = 4, 14, 7
"""Drafts, tokens of the sequence, and the position behind which they are made."""


def their_logits(config: dict[str, Any], tensors: dict[str, Tensor], hidden_LTW: Tensor, token_ids: list[int]) -> list[Tensor]:
    """Logits of each draft of their training-time test at position AT, which feeds the sequence's own tokens."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    parsed = Eagle3SpeculatorConfig(**{key: value for key, value in config.items() if key != "architectures"})
    parsed.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(parsed)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"verifier_norm.weight", "verifier_lm_head.weight"}
    assert unexpected == []
    found: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: found.append(output[0, AT].clone()))
    ids = torch.tensor([[*token_ids[1:], 0]])
    joined = torch.cat(list(hidden_LTW), -1)[None]
    with torch.inference_mode():
        model.eval()(joined, ids, torch.zeros_like(ids), ttt_steps=NUM_STEPS)
    return found


def our_logits(source: str, hidden_LTW: Tensor, token_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Logits of each draft of one request, to which the sequence's own tokens are given as drafts."""
    lm_head = random_tensors({"t": (V, W)})["t"]
    layer = EagleLayer(read_eagle(source, hidden_size=W, vocab_size=V, num_layers=LAYERS), head_target(lm_head, num_layers=LAYERS))
    kv = KVTensors(
        [kv_group(layer.settings)], layout=ReferenceAttention.layout, num_blocks=8, block_size=BLOCK_SIZE, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    proposer = EagleProposer(layer, kv, ReferenceAttention(), Sampler(V))
    state: RequestState = request_state(token_ids[: AT + 2])
    state.block_ids = list(range(8))
    chunk = ScheduledChunk(state=state, start=0, num_tokens=AT + 1, is_prefill=True, logits=range(AT, AT + 1))
    wanted = proposer.wants_hidden(StepPlan(chunks=(chunk,)))
    assert wanted is not None
    plan = StepPlan(chunks=(chunk,), hidden=wanted)
    proposer.observe(ObservedStep(plan=plan, num_accepted=[0], hidden_LKW=hidden_LTW[:, : AT + 1]))
    found: list[Tensor] = []

    def forced(draws: DraftDraws, logits_RC: Tensor, token_ids_C: Tensor | None = None) -> list[int]:
        found.append(logits_RC[0].clone())
        token_id = token_ids[AT + 1 + len(found)]
        state.append(token_id)
        draws.token_ids[0].append(token_id)
        return [token_id] if len(found) < NUM_STEPS else []

    monkeypatch.setattr(DraftDraws, "draw", forced)
    proposer.propose([state], [NUM_STEPS])
    return found


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {}),
        ({"norm_before_residual": True}, {}),
        ({"norm_output": True}, {}),
        ({"norm_before_fc": True}, random_tensors({"input_norm.weight": (3 * W,)}, seed=32)),
        ({"fc_norm": True}, random_tensors({f"fc_norm.{index}.weight": (W,) for index in range(3)}, seed=33)),
    ],
)
def test_logits_of_every_draft_are_those_of_speculators(
    options: dict[str, Any], more: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = speculators_config(**options), eagle3_tensors("layers.0", has_embedding=True) | more
    hidden_LTW = random_tensors({"hidden": (3, NUM_TOKENS, W)}, seed=40)["hidden"]
    token_ids = [(7 * index + 5) % V for index in range(NUM_TOKENS)]
    expected = their_logits(config, tensors, hidden_LTW, token_ids)
    found = our_logits(write_head(tmp_path, config, tensors), hidden_LTW, token_ids, monkeypatch)
    assert len(found) == len(expected) == NUM_STEPS
    for ours_C, theirs_C in zip(found, expected, strict=True):
        assert ours_C.shape == (len(IDS),)
        torch.testing.assert_close(ours_C, theirs_C, rtol=1e-4, atol=1e-4)
