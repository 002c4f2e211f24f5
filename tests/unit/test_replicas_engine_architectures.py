"""Tiny random models of each family through the engine against transformers' own generate, float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MambaConfig, T5Config

from replicas.engine import loader
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.model.loader import choose_model
from replicas.model_support import UnsupportedModel
from replicas.ranks import leader
from replicas.ranks.leader import threads_per_rank
from replicas.sampling_params import SamplingParams
from tests.engine_harness import requests_for, run
from tests.tiny_models import CONFIGS, NATIVE_FAMILIES, SIZES, generated_by_transformers, tiny_prompts

pytestmark = pytest.mark.usefixtures("same_torch_threads")


def _engine(folder: Path, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "dtype": "float32", "kv_cache_bytes": 4 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_threads": 1,
    }  # fmt: skip
    return load_engine(EngineConfig(model=str(folder), **{**defaults, **settings}))


NUM_OUTPUT = 24
RUNS = [
    *((name, {"runner": "native"}) for name in NATIVE_FAMILIES),
    *((name, {"runner": "transformers", "attention_backend": backend}) for name in CONFIGS for backend in ("native", "reference")),
]


@pytest.mark.parametrize(("name", "settings"), RUNS, ids=lambda value: value if isinstance(value, str) else "-".join(value.values()))
def test_engine_with_a_tiny_model_equals_generate(folder_of: Any, name: str, settings: dict[str, str]) -> None:
    folder = folder_of(name)
    engine = _engine(folder, max_num_batched_tokens=13, **settings)
    assert engine.description.runner == settings["runner"]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    prompts = tiny_prompts()
    expected = generated_by_transformers(folder, prompts, NUM_OUTPUT)
    cold = run(engine, requests_for(prompts, greedy, prefix="cold"))
    hot = run(engine, requests_for(prompts, greedy, prefix="hot"))
    assert [g.token_ids for g in cold] == expected
    assert [g.token_ids for g in hot] == expected
    assert [g.num_cached_tokens for g in hot] == [0, 0, 16, 32]


def _save_config(config: Any, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2), "'mamba'"),
        (T5Config(vocab_size=64, d_model=16, num_layers=1), "'t5' is an encoder-decoder"),
        (AutoConfig.for_model("qwen3_next", **{**SIZES, "num_hidden_layers": 4}), "'qwen3_next' has layers of type linear_attention"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "'llama' has rope of type 'dynamic'",
        ),
    ],
)
def test_load_of_a_model_that_cannot_be_served_right_is_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    folder = _save_config(config, tmp_path)
    if config.model_type == "mamba":
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(UnsupportedModel, match=message):
        _engine(folder)


def test_load_of_a_model_whose_attention_has_unknown_terms_is_refused_by_the_self_check(tmp_path: Path) -> None:
    """gpt-oss adds a learned sink to each softmax, which only its own attention knows."""
    sizes = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="'gpt_oss'"):
        _engine(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 129}, "positions for 128"),
        ({"max_model_len": 128, "kv_cache_bytes": 40_000}, "raise kv_cache_bytes or lower max_model_len to"),
        ({"kv_cache_bytes": 100}, "fewer than 2 blocks"),
        ({"device": "cuda"}, "torch sees no CUDA device"),
        ({"runner": "transformers", "attention_backend": "flash"}, "attention_backend must be one of"),
        ({"runner": "transformers", "attention_backend": "varlen_cuda"}, "it runs on CUDA"),
        ({"max_num_batched_tokens": 4}, "at least max_num_seqs"),
        ({"max_mixed_step_s": 0}, "max_mixed_step_s must be above 0"),
        ({"max_step_s": float("inf")}, "max_step_s must be above 0 and finite"),
        ({"max_urgent_pause_s": 0}, "max_urgent_pause_s must be above 0"),
        ({"max_urgent_share": 1.0}, "max_urgent_share must be at least 0 and below 1, got 1.0"),
        ({"model": "./no-such-folder"}, "does not exist"),
    ],
)
def test_load_with_settings_that_cannot_work_names_the_fix(folder_of: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_engine(EngineConfig(**{"model": str(folder_of("llama")), "dtype": "float32", **settings}))


def test_threads_of_torch_are_no_more_than_the_quota_allows(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1] if given else 4)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    for num_cores in (4, 3):
        monkeypatch.setattr(loader, "num_usable_cores", lambda num_cores=num_cores: num_cores)
        _engine(folder_of("llama"), num_threads=None, runner="transformers")
    assert given == [3]
    assert threads_per_rank(EngineConfig(tensor_parallel_size=2, num_threads=5)) == 5
    monkeypatch.setattr(leader, "num_usable_cores", lambda: 5)
    assert threads_per_rank(EngineConfig(tensor_parallel_size=2)) == 2


def test_budgets_of_steps_are_measured_unless_one_is_given(folder_of: Any) -> None:
    measured = _engine(folder_of("llama"), max_num_batched_tokens=None, max_mixed_step_s=1e-9).scheduler.config
    assert measured.max_num_batched_tokens >= 128
    assert measured.max_num_mixed_tokens == 16, "a block, however short the step is to be"
    generous = _engine(folder_of("llama"), max_num_batched_tokens=None, max_mixed_step_s=100.0).scheduler.config
    assert generous.max_num_mixed_tokens == generous.max_num_batched_tokens
    given = _engine(folder_of("llama"), max_num_batched_tokens=64).scheduler.config
    assert (given.max_num_batched_tokens, given.max_num_mixed_tokens) == (64, None)


def test_model_under_the_home_folder_is_found_by_its_short_name(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("gpt2")
    monkeypatch.setenv("HOME", str(folder.parent))
    choice = choose_model(EngineConfig(model=f"~/{folder.name}", device="cpu", runner="transformers"))
    assert choice.source == str(folder)
