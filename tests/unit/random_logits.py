"""Logits for tests of draws."""

from __future__ import annotations

import torch


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """[rows, vocab], normally distributed."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
