"""A gateway over one echo engine, for the tests of what HTTP clients see; tiny models and traces on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path

import httpx
import pytest

from replicas.text.tokenizer import Tokenizer
from router.simulator.synthesize import write_trace
from router.simulator.trace_shapes import SHAPES
from router.simulator.trace_synthesis import synthesize
from tests.unit.in_process_cluster import InProcessCluster, client_of, running_cluster


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a tiny random model of a family once and gives its folder."""
    from tests.tiny_models import save_tiny_model

    return cache(lambda name: save_tiny_model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def conversation_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 requests like those of Mooncake's conversation trace: every prompt begins with the same block."""
    file = tmp_path_factory.mktemp("traces") / "conversation.jsonl"
    write_trace(file, synthesize(SHAPES["conversation"], 300))
    return file


@pytest.fixture(scope="session")
def synthetic_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 requests like those of Mooncake's synthetic trace: two thirds of their blocks were there before."""
    file = tmp_path_factory.mktemp("traces") / "synthetic.jsonl"
    write_trace(file, synthesize(SHAPES["synthetic"], 120))
    return file


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
