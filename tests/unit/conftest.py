"""A gateway over one echo engine, for the tests of what HTTP clients see, and tiny models on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path

import httpx
import pytest

from replicas.text.tokenizer import Tokenizer
from tests.unit.in_process_cluster import InProcessCluster, client_of, running_cluster


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a tiny random model of a family once and gives its folder."""
    from tests.tiny_models import save_tiny_model

    return cache(lambda name: save_tiny_model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
async def cluster(default_tokenizer: Tokenizer) -> AsyncIterator[InProcessCluster]:
    async with running_cluster(default_tokenizer) as running:
        yield running


@pytest.fixture
async def client(cluster: InProcessCluster) -> AsyncIterator[httpx.AsyncClient]:
    """When its test is over, no engine has a request or holds a block."""
    async with client_of(cluster) as made:
        yield made
    await cluster.wait_idle()
