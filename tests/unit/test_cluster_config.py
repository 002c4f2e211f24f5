"""Args of the Serve config: what they become, and the one line that a wrong one gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.settings.config import ConfigError, ModelConfig, read_config, read_environment
from cluster.settings.gateway_config import GatewayConfig
from cluster.settings.limits import RequestLimits
from replicas.engine_config import EngineConfig, ParallelConfig
from replicas.speculation_config import SpeculationConfig
from router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]


def test_args_with_one_model_take_every_default() -> None:
    config = read_config({"models": [{"name": "a"}]})
    assert config.models == (ModelConfig(name="a"),)
    assert config.models[0].engine == EngineConfig()
    assert config.router == RouterConfig()
    assert config.gateway == GatewayConfig()


def test_args_reach_the_frozen_classes() -> None:
    config = read_config(
        {
            "models": [{"name": "a", "num_replicas": 3, "engine": {"dtype": "float32", "max_num_seqs": 7}}],
            "router": {"policy": "least_loaded", "orders": ["fcfs"], "tenant_weights": {"acme": 2}},
            "gateway": {"limits": {"max_n": 3}, "failover": {"max_deaths": 5}},
        }
    )
    assert config.models[0].num_replicas == 3
    assert config.models[0].engine == EngineConfig(dtype="float32", max_num_seqs=7)
    assert config.router.orders == ("fcfs",)
    assert config.router.tenant_weights == {"acme": 2.0}
    assert config.gateway.limits == RequestLimits(max_n=3)
    assert config.gateway.failover.max_deaths == 5


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"speculation": {"method": "suffix", "max_tokens": 4}}, SpeculationConfig(method="suffix", max_tokens=4)),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}, SpeculationConfig(method="ngram", max_tokens=5)),
        ({}, SpeculationConfig()),
    ],
)
def test_speculation_is_taken_in_either_spelling(engine: dict[str, Any], expected: SpeculationConfig) -> None:
    assert read_config({"models": [{"name": "a", "engine": engine}]}).models[0].engine.speculation == expected
    pools = read_config(_disaggregated(decode={"engine": engine})).models[0].pools
    assert [pool.engine.speculation for pool in pools] == [SpeculationConfig(), expected]


def _disaggregated(**keys: Any) -> dict[str, Any]:
    return {"models": [{"name": "a", "mode": "disaggregated", **keys}]}


def test_unified_model_is_one_pool() -> None:
    (model,) = read_config({"models": [{"name": "a", "num_replicas": 3, "num_gpus": 1}]}).models
    (pool,) = model.pools
    assert (pool.role, pool.num_replicas, pool.num_cpus, pool.num_gpus, pool.engine) == ("unified", 3, 1.0, 1.0, EngineConfig())


def test_pools_take_from_the_model_what_they_do_not_set() -> None:
    parallel = {"backend": "gloo", "rank_deadline_s": 30}
    args = _disaggregated(
        num_cpus=2,
        engine={"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 512, "parallel": parallel},
        prefill={"num_replicas": 2, "engine": {"tensor_parallel_size": 2, "parallel": {"rank_deadline_s": 5}}},
        decode={"num_cpus": 0.5, "placement_strategy": "PACK", "engine": {"max_num_seqs": 64, "max_num_batched_tokens": None}},
    )
    (model,) = read_config(args).models
    prefill, decode = model.pools
    assert (prefill.role, prefill.num_replicas, prefill.num_cpus, prefill.placement_strategy) == ("prefill", 2, 2.0, "STRICT_PACK")
    assert (decode.role, decode.num_replicas, decode.num_cpus, decode.placement_strategy) == ("decode", 1, 0.5, "PACK")
    shared = EngineConfig(dtype="float32", parallel=ParallelConfig(backend="gloo", rank_deadline_s=30))
    assert prefill.engine == replace(
        shared,
        role="prefill",
        max_num_seqs=8,
        max_num_batched_tokens=512,
        tensor_parallel_size=2,
        parallel=ParallelConfig(backend="gloo", rank_deadline_s=5),
    )
    assert decode.engine == replace(shared, role="decode", max_num_seqs=64)


def test_what_both_pools_override_is_not_held_against_the_model() -> None:
    pool = {"num_cpus": 1, "engine": {"tensor_parallel_size": 2}}
    model = read_config(_disaggregated(num_cpus=0, engine={"tensor_parallel_size": 2}, prefill=pool, decode=pool)).models[0]
    assert [each.num_cpus for each in model.pools] == [1.0, 1.0]


def test_disaggregated_model_without_sections_has_one_replica_of_each_role() -> None:
    (model,) = read_config(_disaggregated()).models
    assert [(pool.role, pool.num_replicas, pool.engine.role) for pool in model.pools] == [
        ("prefill", 1, "prefill"),
        ("decode", 1, "decode"),
    ]


@pytest.mark.parametrize("path", ["ray_config.yaml", "deploy/examples/disaggregated.yaml"])
def test_shipped_config_is_valid(path: str) -> None:
    shipped = yaml.safe_load((ROOT / path).read_text())
    config = read_config(shipped["applications"][0]["args"])
    assert [model.name for model in config.models] == ["smollm2-135m-instruct"]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "args: models: missing"),
        (
            {"models": [{"name": "a"}], "router": {"hang_timeout_s": float("inf")}},
            "args: router.hang_timeout_s: input should be a finite number, got 'inf'",
        ),
        ({"models": [{"name": "a", "num_cpus": float("nan")}]}, "args: models[0].num_cpus: input should be a finite number"),
        ({"models": []}, "args: models must name at least one model"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "args: models must have different names, got a, a"),
        ({"model": [{"name": "a"}]}, "args: model: unknown key; did you mean 'models'?"),
        ({"models": [{"nam": "a"}]}, "args: models[0].nam: unknown key; did you mean 'name'?"),
        (
            {"models": [{"name": "a", "engine": {"max_num_seq": 4}}]},
            "args: models[0].engine.max_num_seq: unknown key; did you mean 'max_num_seqs'?",
        ),
        ({"models": [{"name": "a", "engine": {"zzz": 4}}]}, "args: models[0].engine.zzz: unknown key; known keys are model, dtype"),
        (
            {"models": [{"name": "a"}], "gateway": {"limits": {"max_m": 4}}},
            "args: gateway.limits.max_m: unknown key; did you mean 'max_n'?",
        ),
        ({"models": [{"name": "a", "engine": {"dtype": "int3"}}]}, "args: models[0].engine.dtype: input should be 'auto'"),
        ({"models": [{"name": "a", "num_replicas": 0}]}, "args: models[0].num_replicas must be at least 1, got 0"),
        ({"models": [{"name": "a", "num_replicas": "many"}]}, "args: models[0].num_replicas: input should be a valid integer"),
        ({"models": [{"name": "a", "engine": {"block_size": 0}}]}, "args: models[0].engine.block_size must be at least 1, got 0"),
        ({"models": [{"name": "../a"}]}, "args: models[0].name must be letters, digits"),
        ({"models": [{"name": "a"}], "router": {"policy": "best"}}, "args: router.policy: input should be 'scoring'"),
        ({"models": [{"name": "a"}], "router": {"aging_s": 0}}, "args: router.aging_s must be above 0, got 0"),
        ({"models": [{"name": "a"}], "gateway": {"limits": {"max_n": 0}}}, "args: gateway.limits.max_n must be at least 1, got 0"),
        (
            {"models": [{"name": "a", "engine": {"model": "/no/such"}}]},
            "args: models[0].engine.model: folder /no/such does not exist; give",
        ),
        ({"models": [{"name": "a", "engine": {"model": "x y z"}}]}, "args: models[0].engine.model: folder x y z does not exist; give"),
        (
            {"models": [{"name": "a", "decode": {}}]},
            "args: models[0].decode is a pool of mode disaggregated; set mode: disaggregated, or leave it out",
        ),
        ({"models": [{"name": "a", "mode": "split"}]}, "args: models[0].mode: input should be 'unified' or 'disaggregated', got 'split'"),
        ({"models": [{"name": "a", "engine": {"role": "decode"}}]}, "args: models[0].engine.role is that of the pool; leave it out"),
        (
            _disaggregated(num_replicas=1),
            "args: models[0].num_replicas is of mode unified; set prefill.num_replicas and decode.num_replicas instead",
        ),
        (_disaggregated(prefill={"num_replica": 2}), "args: models[0].prefill.num_replica: unknown key; did you mean 'num_replicas'?"),
        (
            _disaggregated(decode={"engine": {"tensor_parallel_siz": 2}}),
            "args: models[0].decode.engine.tensor_parallel_siz: unknown key; did you mean 'tensor_parallel_size'?",
        ),
        (
            _disaggregated(decode={"engine": {"parallel": {"backen": "gloo"}}}),
            "args: models[0].decode.engine.parallel.backen: unknown key; did you mean 'backend'?",
        ),
        (_disaggregated(prefill={"engine": {"role": "prefill"}}), "args: models[0].prefill.engine.role is that of the pool; leave it out"),
        *(
            (
                _disaggregated(decode={"engine": {key: value}}),
                f"args: models[0].decode.engine.{key} must be the same in both pools; set it in the model's own engine section instead",
            )
            for key, value in (("model", None), ("dtype", "float32"), ("block_size", 8), ("max_model_len", 9), ("kv_transfer", "auto"))
        ),
        (
            _disaggregated(decode={"engine": {"runner": "transformers"}}),
            "args: models[0].engine.dtype must be named when the pools differ in device or runner",
        ),
        (
            _disaggregated(decode={"engine": {"parallel": {"rank_deadline_s": 0}}}),
            "args: models[0].decode.engine.parallel.rank_deadline_s must be above 0, got 0",
        ),
        *(
            (
                {"models": [{"name": "a", "engine": {"kv_lease_s": lease_s}}]},
                "args: models[0].engine.kv_lease_s must be above 0 and at most",
            )
            for lease_s in (0, 1e12)
        ),
        ({"models": [{"name": "a", "engine": {"transfer_host": "0.0.0.0"}}]}, "args: models[0].engine.transfer_host must be an address"),
        (
            {"models": [{"name": "a", "targets": [{"ttft_s": 2}, {"priority": 0, "ttft_s": 3}]}]},
            "args: models[0].targets must be in ascending order of different priorities, got 0, 0",
        ),
        (
            {"models": [{"name": "a", "targets": [{"priority": 5, "ttft_s": 2}, {"priority": -1, "ttft_s": 3}]}]},
            "args: models[0].targets must be in ascending order of different priorities, got 5, -1",
        ),
        (
            {"models": [{"name": "a", "targets": [{"ttft_s": 2}, {"priority": 1}]}]},
            "args: models[0].targets[1].ttft_s or tpot_s must be set",
        ),
        ({"models": [{"name": "a", "targets": [{"ttft_s": 0}]}]}, "args: models[0].targets[0].ttft_s must be above 0, got 0"),
        ({"models": [{"name": "a", "targets": [{"tpot_s": -1}]}]}, "args: models[0].targets[0].tpot_s must be above 0, got -1"),
        (
            {"models": [{"name": "a", "targets": [{"priority": 10**9, "ttft_s": 1}]}]},
            "args: models[0].targets[0].priority must be from -1000000 to 1000000, got 1000000000",
        ),
        (
            {"models": [{"name": "a", "targets": [{"ttf_s": 1}]}]},
            "args: models[0].targets[0].ttf_s: unknown key; did you mean 'ttft_s'?",
        ),
        (
            {"models": [{"name": "a", "structured_output": {"unsupported": "ignore"}}]},
            "args: models[0].structured_output.unsupported: input should be 'refuse' or 'warn', got 'ignore'",
        ),
        (
            {"models": [{"name": "a", "structured_output": {"begins_after": ""}}]},
            "args: models[0].structured_output.begins_after must have 1 to 64 characters",
        ),
        ({"models": [{"name": "a", "drain_s": 1e12}]}, "args: models[0].drain_s must be from 0 to"),
        (_disaggregated(decode={"num_replicas": 0}), "args: models[0].decode.num_replicas must be at least 1, got 0"),
        (_disaggregated(prefill={"engine": {"max_num_seqs": 0}}), "args: models[0].prefill.engine.max_num_seqs must be at least 1, got 0"),
        (
            _disaggregated(prefill={"engine": {"max_num_seqs": "x"}}),
            "args: models[0].prefill.engine.max_num_seqs: input should be a valid integer",
        ),
        (
            _disaggregated(decode={"num_cpus": 0, "engine": {"tensor_parallel_size": 2}}),
            "args: models[0].decode.num_cpus or num_gpus must be above 0 for each rank",
        ),
        (
            {"models": [{"name": "a", "engine": {"speculation": {"method": "magic"}}}]},
            "args: models[0].engine.speculation.method: input should be 'none', 'auto', 'ngram'",
        ),
        (
            {"models": [{"name": "a", "engine": {"speculation": {"method": "eagle"}}}]},
            "args: models[0].engine.speculation.method 'eagle' needs model: the folder",
        ),
        (
            {"models": [{"name": "a", "engine": {"speculation": {"max_token": 3}}}]},
            "args: models[0].engine.speculation.max_token: unknown key; did you mean 'max_tokens'?",
        ),
        (
            _disaggregated(decode={"engine": {"speculative_config": {"method": "mtp"}}}),
            "args: models[0].decode.engine.speculative_config.method 'mtp' is not supported: the model families that have such modules",
        ),
        (
            {"models": [{"name": "a", "engine": {"speculative_config": {"method": "ngram"}, "speculation": {}}}]},
            "args: models[0].engine.speculative_config: means the same as speculation; leave one of them out",
        ),
        (
            {"models": [{"name": "a", "engine": {"speculative_config": 5}}]},
            "args: models[0].engine.speculative_config: must be a mapping, got 5",
        ),
        (_disaggregated(decode={"num_cpus": -1}), "args: models[0].decode.num_cpus and num_gpus must be at least 0, got -1.0 and 0.0"),
    ],
)
def test_wrong_args_get_one_line_that_names_the_key(args: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(args)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config({"models": [{"name": "a", "engine": {"model": str(tmp_path)}}]})


def test_environment_defaults_and_overrides(tmp_path: Path) -> None:
    assert read_environment({}).log_level == "INFO"
    read = read_environment({"MANTA_LOG_LEVEL": "debug", "MANTA_STATE_DIR": str(tmp_path)})
    assert (read.log_level, read.state_dir) == ("DEBUG", tmp_path)
    with pytest.raises(ConfigError, match="MANTA_LOG_LEVEL must be one of"):
        read_environment({"MANTA_LOG_LEVEL": "LOUD"})
