"""Tiny models of each family divided over ranks, against transformers' own generate and the undivided engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig, ParallelConfig
from replicas.model_support import UnsupportedModel
from replicas.native.build import load_native_library
from replicas.ranks.ranks import RankLost
from replicas.sampling_params import SamplingParams
from tests.engine_harness import requests_for, run
from tests.rank_threads import ThreadLauncher
from tests.tiny_models import SIZES, generated_by_transformers, tiny_prompts

NUM_OUTPUT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=5)

pytestmark = pytest.mark.usefixtures("same_torch_threads")


def _load(folder: Path, size: int, launcher: ThreadLauncher | None = None, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "dtype": "float32", "kv_cache_bytes": 1 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 13, "num_threads": 1,
        "parallel": ParallelConfig(rank_deadline_s=60.0),
    }  # fmt: skip
    config = EngineConfig(model=str(folder), tensor_parallel_size=size, **{**defaults, **settings})
    return load_engine(config, launcher=launcher or ThreadLauncher())


@pytest.mark.parametrize(
    ("name", "runner", "size"),
    [
        ("llama", "native", 2),
        ("llama", "native", 3),  # more ranks than KV heads: one is shared, and queries are uneven
        ("llama-untied", "native", 2),
        ("llama-untied", "transformers", 3),
        ("qwen2", "native", 2),
        ("qwen2", "transformers", 2),
        ("qwen3", "native", 2),
        ("qwen3", "transformers", 3),
        ("gemma2", "transformers", 2),
        ("gpt2", "transformers", 3),  # 4 heads: two, one and one
        ("phi3", "transformers", 2),
    ],
)
def test_divided_tiny_model_equals_generate_and_the_whole_one(folder_of: Any, name: str, runner: str, size: int) -> None:
    folder, prompts = folder_of(name), tiny_prompts()
    expected = generated_by_transformers(folder, prompts, NUM_OUTPUT)
    whole = run(_load(folder, 1, runner=runner), requests_for(prompts, GREEDY))
    engine = _load(folder, size, runner=runner)
    try:
        assert (engine.description.runner, engine.description.tensor_parallel_size) == (runner, size)
        cold = run(engine, requests_for(prompts, GREEDY, prefix="cold"))
        hot = run(engine, requests_for(prompts, GREEDY, prefix="hot"))
    finally:
        engine.close()
    assert [g.token_ids for g in cold] == expected
    assert [g.token_ids for g in hot] == expected
    assert [g.num_cached_tokens for g in hot] == [0, 0, 16, 32]
    for one, divided in zip(whole, cold, strict=True):
        for a, b in zip(one.logprobs, divided.logprobs, strict=True):
            assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-4)


def test_each_rank_holds_its_share_of_the_divided_weights(folder_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="replicas")
    _load(folder_of("llama"), 2).close()
    lines = [record.getMessage() for record in caplog.records if "MiB of weights" in record.getMessage()]
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1"]
    assert all("are 50.00% of" in line for line in lines)


RUNNERS = ["native", "transformers"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_preempted_chunked_and_cancelled_requests_at_two_end_as_on_one_rank(folder_of: Any, runner: str) -> None:
    prompts, num_output = tiny_prompts()[:3], 24
    expected = generated_by_transformers(folder_of("llama"), prompts, num_output)
    bytes_of_5_blocks = 5 * 16 * 3 * 2 * 16 * 4  # tokens, layers, K and V, dim, float32: each rank holds one of two KV heads
    engine = _load(folder_of("llama"), 2, runner=runner, kv_cache_bytes=bytes_of_5_blocks, max_model_len=64, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    try:
        assert engine.scheduler.pool.num_blocks == 5
        (cancelled,) = requests_for([prompts[2]], params, prefix="cancelled")
        engine.add_request(cancelled)
        engine.step()
        assert engine.cancel(cancelled.key)
        engine.step()
        results = run(engine, requests_for(prompts, params))
        assert [r.token_ids for r in results] == expected
        assert engine.stats().num_preemptions > 0
        assert engine.scheduler.pool.num_free == 5
    finally:
        engine.close()


@pytest.mark.parametrize("runner", RUNNERS)
def test_seeded_draws_at_two_equal_those_on_one_rank(folder_of: Any, runner: str) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=NUM_OUTPUT, ignore_eos=True)
    requests = requests_for(tiny_prompts(), params, seeds=[11, 12, 13, 14])
    engine = _load(folder_of("qwen3"), 2, runner=runner)
    try:
        divided = run(engine, requests)
    finally:
        engine.close()
    assert [r.token_ids for r in divided] == [r.token_ids for r in run(_load(folder_of("qwen3"), 1, runner=runner), requests)]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_at_two_pass_the_check_and_answer_alike_twice(
    folder_of: Any, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_native_library()
    cache = Path(".cache") / "manta"
    (tmp_path / cache).mkdir(parents=True)
    (tmp_path / cache / "native").symlink_to(Path.home() / cache / "native")  # kernels take long to build
    monkeypatch.setenv("HOME", str(tmp_path))  # where quantized weights are cached
    answers = []
    for _ in ("made", "cached"):
        engine = _load(folder_of("llama"), 2, quantization=quantization)
        try:
            answers.append([g.token_ids for g in run(engine, requests_for(tiny_prompts(), GREEDY))])
        finally:
            engine.close()
    assert answers[0] == answers[1]
    assert len(list((tmp_path / cache / "packed").glob("*.safetensors"))) == 2, "each rank caches its own part"


def test_fingerprint_does_not_depend_on_the_number_of_ranks(folder_of: Any) -> None:
    engine = _load(folder_of("llama-untied"), 2)
    engine.close()
    assert engine.description.fingerprint == _load(folder_of("llama-untied"), 1).description.fingerprint


def test_failing_step_ends_the_replica_with_all_its_ranks(folder_of: Any) -> None:
    launcher = ThreadLauncher()
    engine = _load(folder_of("llama"), 2, launcher, parallel=ParallelConfig(rank_deadline_s=4.0))
    engine.add_request(requests_for([tiny_prompts()[1]], GREEDY)[0])
    engine.step()

    def fail(step: object) -> torch.Tensor:
        raise RuntimeError("no memory for it")

    engine._runner._runner.forward = fail
    with pytest.raises(RankLost, match="no memory for it"):
        engine.step()
    with pytest.raises(RankLost, match="no memory for it"):
        engine.check_ranks()
    engine.close()
    launcher.ranks[0].thread.join(10)
    assert not launcher.ranks[0].thread.is_alive()


def _saved(config: Any, folder: Path, *, safe: bool = True) -> Path:
    model = AutoModelForCausalLM.from_config(config)
    if safe:
        model.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (LlamaConfig(**SIZES), {"size": 5}, "tensor_parallel_size 5 cannot divide 4 query heads .* sizes from 1 to 4 work"),
        (
            LlamaConfig(**SIZES),
            {"role": "decode", "kv_transfer": "object-store"},
            "kv_transfer 'object-store' is for replicas that Ray serves",
        ),
        (LlamaConfig(**SIZES), {"parallel": ParallelConfig(backend="nccl")}, "parallel.backend 'nccl' works between CUDA devices"),
        (AutoConfig.for_model("olmo2", **SIZES), {}, r"'olmo2': q_proj \(colwise_gather_output\) cannot be divided"),
        (AutoConfig.for_model("mixtral", **SIZES, num_local_experts=2), {}, "'mixtral': .* cannot be divided"),
        (
            AutoConfig.for_model("gpt_neo", hidden_size=16, num_heads=2, num_layers=2, attention_types=[[["global"], 2]]),
            {},
            "'gpt_neo' has no plan",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_before_any_rank_starts(
    tmp_path: Path, config: Any, settings: dict[str, Any], message: str
) -> None:
    launcher = ThreadLauncher()
    with pytest.raises(ValueError, match=message):
        _load(_saved(config, tmp_path), **{"size": 2, "launcher": launcher, **settings})
    assert launcher.ranks == []


def test_weights_that_cannot_be_read_in_parts_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"neither model\.safetensors nor .*; save it with save_pretrained"):
        _load(_saved(LlamaConfig(**SIZES), tmp_path, safe=False), 2)


def test_rank_that_cannot_load_stops_the_load_with_its_reason(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from replicas.ranks import follower

    def fail(*_: object) -> None:
        raise ValueError("no space on this rank's device")

    monkeypatch.setattr(follower, "load_model", fail)
    with pytest.raises(ValueError, match="tensor_parallel_size 2: rank 1: no space on this rank's device"):
        _load(folder_of("llama"), 2, parallel=ParallelConfig(init_deadline_s=2.0))
