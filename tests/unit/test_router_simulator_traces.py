from __future__ import annotations

from pathlib import Path

import pytest

from router.simulator.traces import read_trace
from tests.data_paths import AZURE_CONVERSATION, MOONCAKE_CONVERSATION, MOONCAKE_SYNTHETIC, PUBLIC_DATA, needs_public


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Prompts of 1,200, 1,500, 1,024 and 300 tokens: the second shares a block with the first, the third two."""
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 1500, "input_length": 1500, "output_length": 0, "hash_ids": [0, 3, 4]}\n'
        '{"timestamp": 1500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]}\n'
        '{"timestamp": 4000, "input_length": 300, "output_length": 9, "hash_ids": [5]}\n'
    )
    return trace


def test_mooncake_prompts_agree_exactly_as_far_as_their_hash_ids(mooncake: Path) -> None:
    first, second, third, fourth = read_trace(mooncake, 512)
    assert [len(request.block_keys) for request in (first, second, third, fourth)] == [2, 2, 2, 0]
    assert first.block_keys[0] == second.block_keys[0]
    assert first.block_keys[1] != second.block_keys[1]
    assert third.block_keys == first.block_keys
    assert [request.num_new_tokens for request in (first, second, third, fourth)] == [1_200, 1_500 - 512, 0, 300]


def test_mooncake_times_are_milliseconds_and_no_answer_is_empty(mooncake: Path) -> None:
    requests = read_trace(mooncake, 512)
    assert [request.arrival_s for request in requests] == [0.0, 1.5, 1.5, 4.0]
    assert [request.num_output_tokens for request in requests] == [5, 1, 7, 9]
    assert [request.request_id for request in read_trace(mooncake, 512, 2)] == ["mooncake-0", "mooncake-1"]


def test_mooncake_prompt_repeats_the_token_of_each_block(mooncake: Path) -> None:
    first = read_trace(mooncake, 16)[0]
    assert first.prompt_ids() == (0,) * 512 + (1,) * 512 + (2,) * 176


@pytest.mark.parametrize("block_size", [16, 128, 512])
def test_mooncake_any_block_size_keeps_the_shared_tokens(synthetic_trace: Path, block_size: int) -> None:
    requests = read_trace(synthetic_trace, block_size, 60)
    expected = read_trace(synthetic_trace, 512, 60)
    assert sum(reference.num_new_tokens < reference.num_prompt_tokens for reference in expected) > 10
    for asked, reference in zip(requests, expected, strict=True):
        assert asked.prompt_ids() == reference.prompt_ids()
        # smaller blocks find the same prefix, and up to one block more of a partial last one
        assert 0 <= reference.num_new_tokens - asked.num_new_tokens < 512


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.5000001,374,44\n"
        "2023-11-17 00:00:03.7500002,374,0\n"
        "2023-11-17 00:00:03.7500003,1000,5\n"
    )
    requests = read_trace(trace, 16)
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 4.25, 4.25])
    assert [(request.num_prompt_tokens, request.num_output_tokens) for request in requests] == [(374, 44), (374, 1), (1_000, 5)]
    keys = [key for request in requests for key in request.block_keys]
    assert len(set(keys)) == len(keys) == 374 // 16 + 374 // 16 + 1_000 // 16


@needs_public(MOONCAKE_CONVERSATION)
def test_public_conversation_trace_shares_exactly_block_zero() -> None:
    first, second = read_trace(PUBLIC_DATA / MOONCAKE_CONVERSATION, 512, 2)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.arrival_s) == (6_758, 500, 0.0)
    assert first.block_keys[0] == second.block_keys[0]
    assert first.block_keys[1] != second.block_keys[1]
    assert (first.num_new_tokens, second.num_new_tokens) == (6_758, 7_322 - 512)


@pytest.mark.slow
@needs_public(MOONCAKE_SYNTHETIC)
def test_public_synthetic_trace_has_the_published_prefix_share() -> None:
    # 64.0 % of the synthetic trace's blocks were seen before, partial ones included (the data's own description)
    requests = read_trace(PUBLIC_DATA / MOONCAKE_SYNTHETIC, 512)
    num_blocks = sum(-(-asked.num_prompt_tokens // 512) for asked in requests)
    num_known = sum((asked.num_prompt_tokens - asked.num_new_tokens) // 512 for asked in requests)
    assert num_known / num_blocks == pytest.approx(0.640, abs=0.01)


@needs_public(AZURE_CONVERSATION)
def test_public_azure_trace_is_read() -> None:
    requests = read_trace(PUBLIC_DATA / AZURE_CONVERSATION, 16, 50)
    assert (requests[0].num_prompt_tokens, requests[0].num_output_tokens) == (374, 44)
    assert requests[1].arrival_s == pytest.approx(50.995169 - 46.680590)


def test_read_trace_bad_input_is_named(mooncake: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_size must divide 512, got 100"):
        read_trace(mooncake, 100)
    with pytest.raises(ValueError, match=r"trace must be a Mooncake \.jsonl or an Azure \.csv file, got x\.txt"):
        read_trace(tmp_path / "x.txt", 16)
    damaged = tmp_path / "bad.jsonl"
    damaged.write_text('{"timestamp": 0, "input_length": 5000, "output_length": 5, "hash_ids": [1]}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1: no Mooncake request: 1 hash ids for 5000 tokens"):
        read_trace(damaged, 16)
