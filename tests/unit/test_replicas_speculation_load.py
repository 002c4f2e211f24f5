"""Engines loaded with speculation: measured costs, the proposers of each method, and answers over the offline API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.sampling_params import SamplingParams
from replicas.speculation_config import SpeculationConfig
from tests.engine_harness import requests_for, run

pytestmark = pytest.mark.usefixtures("same_torch_threads")

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def load(folder: Path, method: Any, **speculation: Any) -> Engine:
    return load_engine(
        EngineConfig(
            model=str(folder), dtype="float32", kv_cache_bytes=1 << 20, block_size=8, max_num_seqs=8, max_num_batched_tokens=32,
            max_model_len=96, num_threads=1, speculation=SpeculationConfig(method=method, **speculation),
        )
    )  # fmt: skip


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto"])
def test_engine_with_a_method_answers_as_without_and_knows_its_costs(folder_of: Callable[[str], Path], method: str) -> None:
    asked = requests_for([[5, 6, 7, 8] * 5, [9]], PARAMS)
    plain = load(folder_of("llama"), "none")
    expected = [result.token_ids for result in run(plain, asked)]
    assert plain.stats().speculation_gain is None
    engine = load(folder_of("llama"), method)
    assert engine._speculator is not None
    cost = engine._speculator.controller.cost
    assert list(cost.num_rows) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24], "up to a full batch and the drafts of one request"
    assert list(cost.row_s) == sorted(cost.row_s)
    assert cost.row_s[0] > 0
    assert [result.token_ids for result in run(engine, asked)] == expected
    assert (engine.stats().speculation_gain or 0) >= 1
    predicted = [replace(one, request_id=f"p{one.request_id}", predicted_ids=tuple(ids)) for one, ids in zip(asked, expected, strict=True)]
    assert [result.token_ids for result in run(engine, predicted)] == expected
    assert [one.name for one in engine._speculator._quick] == ["prediction", "suffix" if method == "auto" else method]
    for one in (plain, engine):
        one.close()


def test_method_whose_files_are_missing_is_one_line_that_names_them(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"the folder /nowhere does not exist") as error:
        load(folder_of("llama"), "eagle", model="/nowhere")
    assert "\n" not in str(error.value)
