"""Made traces against what is published about the public ones (the figures below are of the whole public files)."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from router.simulator.trace_shapes import SHAPES
from router.simulator.trace_synthesis import MadeRequest, synthesize

# kind -> requests, requests/s, prompt tokens and output tokens (mean, p50, p90, p99)
PUBLISHED = {
    "conversation": (12_031, 3.40, (12_035, 6_909, 27_367, 85_401), (343, 350, 597, 1_120)),
    "synthetic": (3_993, 3.91, (15_326, 11_587, 38_615, 66_458), (149, 69, 389, 769)),
    "azure-code": (8_819, 2.57, (2_048, 1_469, 5_194, 7_436), (27.9, 13, 55, 252)),
    "azure-conversation": (19_366, 5.53, (1_155, 1_020, 2_735, 4_142), (211, 129, 424, 601)),
}


@cache
def made(kind: str, num_requests: int, seed: int = 0) -> list[MadeRequest]:
    return list(synthesize(SHAPES[kind], num_requests, seed=seed))


def quantile(values: list[int], share: float) -> int:
    return sorted(values)[int(share * (len(values) - 1))]


def found_blocks(requests: list[MadeRequest]) -> list[int]:
    """Of each request the leading blocks that came before, in a cache without bounds."""
    seen: set[int] = set()
    found = []
    for request in requests:
        found.append(next((index for index, block in enumerate(request.hash_ids) if block not in seen), len(request.hash_ids)))
        seen.update(request.hash_ids)
    return found


def share_of(requests: list[MadeRequest]) -> float:
    return sum(found_blocks(requests)) / sum(len(request.hash_ids) for request in requests)


def gap_variation(requests: list[MadeRequest]) -> float:
    gaps = [after.arrival_s - before.arrival_s for before, after in pairwise(requests)]
    return pstdev(gaps) / fmean(gaps)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_lengths_of_a_kind_are_those_published(kind: str) -> None:
    num_requests, _, prompt, output = PUBLISHED[kind]
    requests = made(kind, num_requests)
    for values, (mean, *quantiles) in (
        ([request.num_prompt_tokens for request in requests], prompt),
        ([request.num_output_tokens for request in requests], output),
    ):
        assert fmean(values) == pytest.approx(mean, rel=0.05)
        assert [quantile(values, share) for share in (0.5, 0.9, 0.99)] == pytest.approx(quantiles, rel=0.08)


def test_lengths_of_tool_calls_have_the_published_means() -> None:
    # of this trace means alone are published: 8,596 tokens in, 182 out
    requests = made("toolagent", 23_608)
    assert fmean(request.num_prompt_tokens for request in requests) == pytest.approx(8_596, rel=0.05)
    assert fmean(request.num_output_tokens for request in requests) == pytest.approx(182, rel=0.05)


@pytest.mark.parametrize(("kind", "tolerance"), [("conversation", 0.03), ("synthetic", 0.05), ("azure-conversation", 0.03)])
def test_rate_of_a_kind_is_the_published_one(kind: str, tolerance: float) -> None:
    num_requests, rate, *_ = PUBLISHED[kind]
    assert num_requests / made(kind, num_requests)[-1].arrival_s == pytest.approx(rate, rel=tolerance)


def test_arrivals_vary_as_published() -> None:
    # coefficient of variation of the gaps: Poisson, 1.09, and 13.2 with gaps of minutes between bursts
    assert gap_variation(made("synthetic", 3_993)) == pytest.approx(1.0, abs=0.05)
    assert gap_variation(made("azure-conversation", 19_366)) == pytest.approx(1.09, abs=0.05)
    code = made("azure-code", 8_819)
    assert gap_variation(code) == pytest.approx(13.2, rel=0.15)
    assert max(after.arrival_s - before.arrival_s for before, after in pairwise(code)) > 60
    # the conversation trace is recorded in steps of 3 s
    assert {request.arrival_s % 3 for request in made("conversation", 1_000)} == {0.0}


@pytest.mark.parametrize(("kind", "published"), [("conversation", 0.366), ("synthetic", 0.640), ("toolagent", 0.59)])
def test_prefix_share_of_a_kind_is_the_published_one(kind: str, published: float) -> None:
    assert share_of(made(kind, 3_993)) == pytest.approx(published, abs=0.01)


def test_requests_that_find_a_prefix_are_about_as_many_as_published() -> None:
    # of the synthetic trace 44.6 % find a block and 43.8 % two; every conversation finds the first, and 38.7 % two
    found = found_blocks(made("synthetic", 3_993))
    assert fmean(num >= 1 for num in found) == pytest.approx(0.446, abs=0.05)
    assert fmean(num >= 2 for num in found) == pytest.approx(0.438, abs=0.05)
    found = found_blocks(made("conversation", 12_031))
    assert fmean(num >= 1 for num in found) > 0.99
    assert 0.25 < fmean(num >= 2 for num in found) < 0.45


@pytest.mark.parametrize("asked", [0.1, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("kind", ["conversation", "synthetic"])
def test_prefix_share_can_be_asked_for(kind: str, asked: float) -> None:
    assert share_of(list(synthesize(SHAPES[kind], 1_500, seed=3, prefix_share=asked))) == pytest.approx(asked, abs=0.02)


def test_kinds_without_prefixes_share_nothing() -> None:
    assert share_of(made("azure-code", 2_000)) == 0


def test_every_prompt_has_an_id_for_each_block_and_no_full_block_follows_a_partial_one() -> None:
    requests = made("conversation", 2_000)
    assert all(len(request.hash_ids) == -(-request.num_prompt_tokens // 512) for request in requests)
    partial = {request.hash_ids[-1] for request in requests if request.num_prompt_tokens % 512}
    inner = {block for request in requests for block in request.hash_ids[:-1]}
    assert not partial & inner


def test_block_has_one_parent_in_the_whole_trace() -> None:
    parents: dict[int, int] = {}
    for request in made("toolagent", 3_000):
        for parent, block in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
            assert parents.setdefault(block, parent) == parent


def test_same_seed_gives_the_same_requests_and_another_others() -> None:
    assert list(synthesize(SHAPES["toolagent"], 200, seed=4)) == made("toolagent", 200, 4)
    assert made("toolagent", 200, 4) != made("toolagent", 200, 5)


def test_rate_that_is_asked_for_speeds_up_all_arrivals() -> None:
    usual = made("azure-code", 500)
    fast = list(synthesize(SHAPES["azure-code"], 500, rate_per_s=2 * 2.57))
    assert [request.arrival_s for request in fast] == pytest.approx([request.arrival_s / 2 for request in usual])
    assert [request.hash_ids for request in fast] == [request.hash_ids for request in usual]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_requests": 0}, "requests must be at least 1, got 0"),
        ({"num_requests": 1, "rate_per_s": 0.0}, r"rate must be above 0, got 0\.0"),
        ({"num_requests": 1, "prefix_share": 1.0}, r"prefix share must be at least 0 and below 1, got 1\.0"),
    ],
)
def test_argument_that_makes_no_sense_is_named(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(synthesize(SHAPES["synthetic"], **arguments))  # type: ignore[arg-type]
