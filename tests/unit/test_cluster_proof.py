"""A configuration proven before it replaces anything: what becomes of the answers, and one proof for real."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cluster.serve import proof
from cluster.serve.proof import prove, run_proof
from cluster.settings.config import ConfigError, read_config
from replicas.engine_config import EngineConfig

GIB = 2**30


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the other process answers; `asked` has what it was asked."""
    told: dict[str, Any] = {"memory_bytes": 10 * GIB, "engines": []}

    def run(engines: list[tuple[EngineConfig, bool]], environment: dict[str, str]) -> dict[str, Any]:
        told["asked"] = engines
        return told

    monkeypatch.setattr(proof, "run_proof", run)
    return told


def test_every_pool_is_proven_with_whether_it_has_a_gpu(answer: dict[str, Any]) -> None:
    pools = {"mode": "disaggregated", "prefill": {"num_gpus": 1}, "decode": {"engine": {"max_num_seqs": 3}}}
    answer["engines"] = [{"weight_bytes": GIB}] * 3
    prove(read_config({"models": [{"name": "a", **pools}, {"name": "b", "engine": {"quantization": "int8"}}]}), {})
    assert [(engine.role, engine.max_num_seqs, engine.quantization, has_gpu) for engine, has_gpu in answer["asked"]] == [
        ("prefill", 64, None, True),
        ("decode", 3, None, False),
        ("unified", 64, "int8", False),
    ]


def test_error_of_a_model_is_one_line_that_names_it(answer: dict[str, Any]) -> None:
    answer["engines"] = [{"weight_bytes": GIB}, {"error": "it is gated: set HF_TOKEN"}]
    with pytest.raises(ConfigError) as error:
        prove(read_config({"models": [{"name": "a"}, {"name": "b"}]}), {})
    assert str(error.value) == "args: models[1] (b): it is gated: set HF_TOKEN"


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        ({"num_replicas": 5}, True),  # 5 * 2 GiB
        ({"num_replicas": 6}, False),
        ({"num_replicas": 2, "engine": {"kv_cache_bytes": 3 * GIB}}, True),  # 2 * (2 + 3)
        ({"num_replicas": 2, "engine": {"kv_cache_bytes": 4 * GIB}}, False),
        ({"engine": {"kv_cache_bytes": 4 * GIB, "tensor_parallel_size": 2}}, True),  # 2 + 2 * 4
        ({"engine": {"kv_cache_bytes": 5 * GIB, "tensor_parallel_size": 2}}, False),
        ({"num_replicas": 6, "num_gpus": 1}, True),  # in the GPUs' memory
    ],
)
def test_weights_and_kv_of_all_replicas_must_fit_into_the_machine(answer: dict[str, Any], model: dict[str, Any], fits: bool) -> None:
    answer["engines"] = [{"weight_bytes": 2 * GIB}]
    config = read_config({"models": [{"name": "a", **model}]})
    if fits:
        prove(config, {})
    else:
        with pytest.raises(ConfigError, match=r"take 1\d\.0 GiB, and this machine has 10\.0 GiB"):
            prove(config, {})


@pytest.mark.slow
def test_real_proof_tells_good_from_bad_without_a_network(folder_of: Any) -> None:
    folder: Path = folder_of("llama")
    engines = [EngineConfig(model=str(folder), runner="transformers"), EngineConfig(model="nobody/nothing")]
    answer = run_proof([(engine, False) for engine in engines], {**os.environ, "HF_HUB_OFFLINE": "1"})
    assert answer["memory_bytes"] > 2**28
    assert answer["engines"][0]["weight_bytes"] > 0
    assert "model 'nobody/nothing' is not in the cache" in answer["engines"][1]["error"]


@pytest.mark.slow
def test_proof_that_does_not_answer_changes_nothing() -> None:
    with pytest.raises(ConfigError, match="nothing was changed"):
        run_proof([(EngineConfig(model="nobody/nothing"), False)], dict(os.environ), timeout_s=0.05)
    with pytest.raises(ConfigError, match=r"cannot be proven, nothing was changed: .*Error"):
        run_proof(["no engine"], dict(os.environ))  # type: ignore[list-item]
