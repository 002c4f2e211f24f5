"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.model.default_model import prepare_default_model
from replicas.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """Folder of the default model; the first run on a machine makes it, which takes a few seconds."""
    return prepare_default_model()


@pytest.fixture(scope="session")
def default_tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(default_model_dir)


@pytest.fixture
def same_torch_threads() -> Iterator[None]:
    """Engines set torch's threads for the whole process; the next test finds them as they were."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
