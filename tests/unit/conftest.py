"""A gateway over one echo engine, for the tests of what HTTP clients see."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from replicas.text.tokenizer import Tokenizer
from tests.unit.in_process_cluster import InProcessCluster, client_of, running_cluster


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
