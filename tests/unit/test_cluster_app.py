"""The application graph as Serve gets it; nothing is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from cluster import app
from cluster.app import build, graph
from cluster.settings.config import ClusterConfig, ConfigError, read_config
from cluster.settings.latency_targets import LatencyTarget
from cluster.settings.structured_output import StructuredOutputConfig


def graph_of(*models: dict[str, Any]) -> Application:
    return graph(read_config({"models": models}), "INFO", surge_percent=0)


def test_graph_gives_the_router_the_names_of_all_models() -> None:
    application = graph_of({"name": "a", "num_replicas": 2}, {"name": "org/b"})
    assert isinstance(application, Application)
    _, router, *_ = application._bound_deployment.init_args
    assert router._bound_deployment.init_args[1] == {"a", "org/b"}


def test_build_refuses_wrong_args_in_one_line() -> None:
    """In Serve's own exception: after any other it tries again three times, and shows a traceback."""
    with pytest.raises(RayServeException, match="did you mean 'models'") as error:
        build({"modls": []})
    assert "\n" not in str(error.value)


def test_build_gives_up_before_it_changes_anything_when_a_model_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: ClusterConfig, environment: Mapping[str, str]) -> None:
        raise ConfigError(f"args: models[0] ({config.models[0].name}): cannot be had")

    monkeypatch.setattr(app, "prove", refuse)
    monkeypatch.setattr(app, "has_room_for", lambda needs: pytest.fail("room was asked for"))
    with pytest.raises(RayServeException, match=r"^args: models\[0\] \(a\): cannot be had$"):
        build({"models": [{"name": "a"}]})


@pytest.mark.parametrize(("has_room", "surge_percent"), [(True, 1), (False, 0)])
def test_successors_start_first_where_there_is_room(monkeypatch: pytest.MonkeyPatch, has_room: bool, surge_percent: int) -> None:
    monkeypatch.setattr(app, "prove", lambda config, environment: None)
    monkeypatch.setattr(app, "has_room_for", lambda needs: has_room)
    gateway = build({"models": [{"name": "a"}]})._bound_deployment
    replica = gateway.init_args[2]["a"]["unified"]._bound_deployment
    assert [each._deployment_config.max_surge_percent for each in (gateway, replica)] == [surge_percent] * 2


def test_graph_binds_a_deployment_for_each_pool_of_a_model() -> None:
    pools = {"prefill": {"num_replicas": 2, "engine": {"num_threads": 3}}, "decode": {"num_replicas": 3, "engine": {"num_threads": 1}}}
    unified = {"name": "b", "drain_s": 5, "engine": {"num_threads": 2}, "targets": [{"priority": 0, "ttft_s": 2}]}
    unified["structured_output"] = {"unsupported": "warn"}
    application = graph_of({"name": "org/a", "mode": "disaggregated", "drain_s": 5, "engine": {"kv_lease_s": 7}, **pools}, unified)
    _, _, replicas, targets, structured_output, _ = application._bound_deployment.init_args
    assert structured_output == {"org/a": StructuredOutputConfig(), "b": StructuredOutputConfig(unsupported="warn")}
    assert targets == {"org/a": (), "b": (LatencyTarget(priority=0, ttft_s=2.0),)}
    assert {model: tuple(roles) for model, roles in replicas.items()} == {"org/a": ("prefill", "decode"), "b": ("unified",)}
    deployments = [one._bound_deployment for roles in replicas.values() for one in roles.values()]
    assert [(each.name, each.num_replicas) for each in deployments] == [
        ("replica-org-a-prefill", 2),
        ("replica-org-a-decode", 3),
        ("replica-b", 1),
    ]
    for deployment, role in zip(deployments, ("prefill", "decode", "unified"), strict=True):
        _, engine, num_replicas, demand, *_ = deployment.init_args
        assert (engine.role, num_replicas, demand.num_threads) == (role, 6, 2 * 3 + 3 * 1 + 2)
    waits_s = [each._deployment_config.graceful_shutdown_timeout_s for each in deployments]
    assert waits_s[0] == waits_s[1] > waits_s[2] + 7, "a replica that hands over must outlive its leases"
