"""Tiny random models of each family through the engine against transformers' own generate, float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from replicas.engine import Engine
from replicas.engine_config import EngineConfig
from replicas.model_support import UnsupportedModel
from replicas.sampling_params import SamplingParams
from tests.engine_harness import requests_for, run

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
NUM_OUTPUT = 24

CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-untied": LlamaConfig(**{**SIZES, "vocab_size": 100, "intermediate_size": 56}, attention_bias=True, tie_word_embeddings=False),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=9),
    "gemma2": Gemma2Config(**SIZES, sliding_window=9, attn_logit_softcapping=5.0, final_logit_softcapping=10.0, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=9, query_pre_attn_scalar=16),
    "gpt2": GPT2Config(vocab_size=128, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2),
    "phi3": Phi3Config(**{key: value for key, value in SIZES.items() if key != "head_dim"}, sliding_window=9),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saves a tiny random model of a family once and gives its folder."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            torch.manual_seed(len(name))
            model = AutoModelForCausalLM.from_config(CONFIGS[name])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)  # so that greedy choices are not near ties
            folders[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(folders[name])
        return folders[name]

    return folder


def _engine(folder: Path, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 4 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return Engine.load(EngineConfig(model=str(folder), **{**defaults, **settings}))


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in (1, 5, 23, 40)]


def _expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return [
        model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), max_new_tokens=NUM_OUTPUT, do_sample=False)[
            0, len(p) :
        ].tolist()
        for p in prompts
    ]


NATIVE_FAMILIES = ("llama", "llama-untied", "llama3-rope", "qwen2", "qwen3", "mistral")
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
    prompts = _prompts()
    expected = _expected(folder, prompts)
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
        ({"model": "./no-such-folder"}, "does not exist"),
    ],
)
def test_load_with_settings_that_cannot_work_names_the_fix(folder_of: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.load(EngineConfig(**{"model": str(folder_of("llama")), "dtype": "float32", **settings}))
