from __future__ import annotations

from pathlib import Path

import pytest

from router.simulator.traces import read_trace
from tests.data_paths import SHARED_DATA

CONVERSATION = SHARED_DATA / "traces" / "mooncake_conversation_trace.jsonl"
SYNTHETIC = SHARED_DATA / "traces" / "mooncake_synthetic_trace.jsonl"
AZURE = SHARED_DATA / "traces" / "azure_llm_2023_conv.csv"


def test_mooncake_first_rows_share_exactly_block_zero() -> None:
    first, second = read_trace(CONVERSATION, 512, 2)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.arrival_s) == (6_758, 500, 0.0)
    assert len(first.block_keys) == 6_758 // 512
    assert len(first.prompt_ids()) == 6_758
    assert first.block_keys[0] == second.block_keys[0]
    assert first.block_keys[1] != second.block_keys[1]
    assert (first.num_new_tokens, second.num_new_tokens) == (6_758, 7_322 - 512)


@pytest.mark.parametrize("block_size", [16, 128, 512])
def test_mooncake_any_block_size_keeps_the_shared_tokens(block_size: int) -> None:
    requests = read_trace(SYNTHETIC, block_size, 60)
    expected = read_trace(SYNTHETIC, 512, 60)
    for asked, reference in zip(requests, expected, strict=True):
        assert asked.prompt_ids() == reference.prompt_ids()
        # smaller blocks find the same prefix, and up to one block more of a partial last one
        assert 0 <= reference.num_new_tokens - asked.num_new_tokens < 512


@pytest.mark.slow
def test_mooncake_unbounded_share_equals_the_published_figure() -> None:
    # 64.0 % of the synthetic trace's blocks were seen before, partial ones included (the data's own description)
    requests = read_trace(SYNTHETIC, 512)
    num_blocks = sum(-(-asked.num_prompt_tokens // 512) for asked in requests)
    num_known = sum((asked.num_prompt_tokens - asked.num_new_tokens) // 512 for asked in requests)
    assert num_known / num_blocks == pytest.approx(0.640, abs=0.01)


def test_azure_prompts_share_nothing() -> None:
    requests = read_trace(AZURE, 16, 50)
    assert (requests[0].num_prompt_tokens, requests[0].num_output_tokens) == (374, 44)
    assert requests[1].arrival_s == pytest.approx(50.995169 - 46.680590)
    keys = [key for asked in requests for key in asked.block_keys]
    assert len(set(keys)) == len(keys)


def test_read_trace_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_size must divide 512, got 100"):
        read_trace(SYNTHETIC, 100)
    with pytest.raises(ValueError, match=r"trace must be a Mooncake \.jsonl or an Azure \.csv file, got x\.txt"):
        read_trace(tmp_path / "x.txt", 16)
    damaged = tmp_path / "bad.jsonl"
    damaged.write_text('{"timestamp": 0, "input_length": 5000, "output_length": 5, "hash_ids": [1]}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1: no Mooncake request: 1 hash ids for 5000 tokens"):
        read_trace(damaged, 16)
