"""Fixtures that more than one test module needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicas.default_model import prepare_default_model
from replicas.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """Folder of the default model; the first run on a machine makes it, which takes a few seconds."""
    return prepare_default_model()


@pytest.fixture(scope="session")
def default_tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(default_model_dir)
