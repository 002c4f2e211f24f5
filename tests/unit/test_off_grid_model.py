"""The copy off the grid computes the same function with other weights."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM

from tests.off_grid_model import take_off_grid
from tests.tiny_models import CONFIGS


def test_model_taken_off_the_grid_gives_the_same_logits_with_other_weights() -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"])).eval()
    token_ids = torch.randint(0, 128, (1, 20))
    with torch.no_grad():
        before = {name: value.clone() for name, value in model.named_parameters()}
        expected = model(token_ids).logits
        take_off_grid(model)
        torch.testing.assert_close(model(token_ids).logits, expected, rtol=1e-4, atol=1e-5)
    same = {name for name, value in model.named_parameters() if torch.equal(value, before[name])}
    assert same == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
