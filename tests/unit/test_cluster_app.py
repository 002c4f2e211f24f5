"""The application graph as Serve gets it; nothing is started."""

from __future__ import annotations

import pytest
from ray.serve import Application

from cluster.app import build
from cluster.config import ConfigError


def test_build_binds_one_graph_for_several_models() -> None:
    application = build({"models": [{"name": "a", "num_replicas": 2}, {"name": "org/b"}]})
    assert isinstance(application, Application)


def test_build_refuses_wrong_args_in_one_line() -> None:
    with pytest.raises(ConfigError, match="did you mean 'models'"):
        build({"modls": []})
