"""Suffix drafts against a count of all occurrences, as the paper defines them (arXiv 2411.04975)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.speculation import suffix
from replicas.speculation.occurrences import END, MAX_MATCH, MIN_ESTIMATE, RUN_LENGTHS, Occurrences
from replicas.speculation.suffix import FinishedAnswers, SuffixProposer
from tests.speculation_states import new_state


def counted(text: Sequence[int], token_ids: Sequence[int], budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """For each length p that matches at least the longest run that occurs: the sum of estimates, and the draft. Several drafts of one
    p are those that ties allow."""
    places: dict[int, list[int]] = {}  # p -> ends of the occurrences of the last p tokens that have a successor
    for p in range(1, min(len(token_ids), MAX_MATCH) + 1):
        tail = list(token_ids[-p:])
        places[p] = [end for end in range(p, len(text)) if list(text[end - p : end]) == tail and text[end] != END]
    least = next((run for run in RUN_LENGTHS if places.get(run)), None)
    if least is None:
        return []
    found: list[tuple[float, tuple[int, ...]]] = []
    for p, ends in places.items():
        if p >= least and ends:
            follow(text, ends, min(budget, p), 1.0, 0.0, (), found)
    return found


def follow(
    text: Sequence[int],
    ends: list[int],
    most: int,
    estimate: float,
    score: float,
    draft: tuple[int, ...],
    found: list[tuple[float, tuple[int, ...]]],
) -> None:
    votes = Counter(text[end] for end in ends if end < len(text) and text[end] != END)
    if len(draft) == most or not votes or estimate * max(votes.values()) / len(ends) < MIN_ESTIMATE:
        found.append((score, draft))
        return
    chance = estimate * max(votes.values()) / len(ends)
    for token_id in [token_id for token_id, num in votes.items() if num == max(votes.values())]:
        behind = [end + 1 for end in ends if end < len(text) and text[end] == token_id]
        follow(text, behind, most, chance, score + chance, (*draft, token_id), found)


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=15), budget=st.integers(1, 6))
def test_continuation_of_a_text_by_itself_is_among_the_best_of_a_count(text: list[int], budget: int) -> None:
    occurrences = Occurrences(64)
    occurrences.extend(text)
    found = occurrences.continuation(text, budget)
    best = counted(text, text, budget)
    assert bool(found.token_ids) == bool(best)
    if best:
        assert (pytest.approx(found.score), tuple(found.token_ids)) in best


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=3),
    asked=st.lists(st.integers(0, 2), min_size=2, max_size=6),
)
def test_no_continuation_reaches_from_one_answer_into_the_next(texts: list[list[int]], asked: list[int]) -> None:
    occurrences = Occurrences(64)
    joined: list[int] = []
    for text in texts:
        joined += [*text, END]
    occurrences.extend(joined)
    found = occurrences.continuation(asked, 5)
    best = counted(joined, asked, 5)
    assert bool(found.token_ids) == bool(best)
    if best:
        assert (pytest.approx(found.score), tuple(found.token_ids)) in best
        assert END not in found.token_ids


def test_most_frequent_continuation_wins_and_estimates_multiply() -> None:
    occurrences = Occurrences(64)
    occurrences.extend([1, 2, 3, 8, END, 1, 2, 3, 9, END, 1, 2, 4, 7])
    found = occurrences.continuation([5, 1, 2], 4)
    assert list(found.token_ids) == [3, 9], "2 of 3 say 3; behind it 8 and 9 are equal, and 9 is newer"
    assert found.score == pytest.approx(2 / 3 + 2 / 3 * 1 / 2)
    assert found.match_length == 2


def test_draft_is_no_longer_than_its_match() -> None:
    occurrences = Occurrences(64)
    occurrences.extend(range(10, 40))
    assert list(occurrences.continuation([10, 11], 8).token_ids) == [12, 13]
    assert list(occurrences.continuation(range(10, 16), 8).token_ids) == list(range(16, 22))
    assert list(occurrences.continuation(range(10, 30), 8).token_ids) == list(range(30, 38))


@given(num_extra=st.integers(0, 40))
def test_full_memory_forgets_its_oldest_tokens_alone(num_extra: int) -> None:
    occurrences = Occurrences(16)
    text = [50, 51, 52, 53, 54, *range(100, 100 + num_extra), 60, 61, 62, 63, 64]
    occurrences.extend(text)
    assert list(occurrences.continuation([60, 61], 1).token_ids) == [62]
    expected = [52] if 50 in text[-16:] else []
    assert list(occurrences.continuation([50, 51], 1).token_ids) == expected


def test_answers_of_a_tenant_are_drafted_for_it_alone() -> None:
    proposer = SuffixProposer(1 << 12)
    done = new_state([9], [21, 22, 23, 24, 25, 26], tenant="blue")
    proposer.forget(done)
    proposer.propose([], [])
    asking = [
        new_state([7], [21, 22, 23, 24], name="b", tenant=tenant, cache_salt=salt)
        for tenant, salt in (("blue", ""), ("red", ""), ("blue", "x"))
    ]
    drafts = proposer.propose(asking, [4, 4, 4])
    assert [list(draft.token_ids) for draft in drafts] == [[25, 26], [], []]
    assert drafts[0].evidence == (4).bit_length()


def test_own_text_and_finished_answers_compete_by_score() -> None:
    proposer = SuffixProposer(1 << 12)
    proposer.forget(new_state([9], [1, 2, 3, 4, 5, 6, 7, 8]))
    proposer.propose([], [])
    (draft,) = proposer.propose([new_state([3, 4, 99, 30, 1, 2, 3, 4], name="b")], [4])
    assert list(draft.token_ids) == [5, 6, 7, 8], "four tokens match there, two here"


def test_finished_answers_never_hold_more_than_their_room_and_the_oldest_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "FIRST_PART_TOKENS", 16)
    answers = FinishedAnswers(64)
    for number in range(20):
        answers.add((f"t{number % 3}", ""), list(range(100 * number, 100 * number + 15)))
        answers.index(1000)
        assert answers.num_tokens <= 64
    assert list(answers.continuation(("t1", ""), [1900, 1901, 1902, 1903], 2).token_ids) == [1904, 1905]
    assert not answers.continuation(("t0", ""), [0, 1, 2, 3], 2).token_ids


def test_no_answers_are_remembered_without_room() -> None:
    answers = FinishedAnswers(0)
    answers.add(("a", ""), [1, 2, 3, 4, 5])
    answers.index(100)
    assert (answers.num_tokens, list(answers.continuation(("a", ""), [1, 2, 3], 2).token_ids)) == (0, [])


def test_indexing_is_spread_over_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_INDEXED_TOKENS", 4)
    proposer = SuffixProposer(1 << 12)
    proposer.forget(new_state([9], [1, 2, 3, 4, 5, 6, 7]))
    state = new_state([1, 2, 3, 8, 1, 2], name="b")
    drafts = [list(proposer.propose([state], [2])[0].token_ids) for _ in range(4)]
    assert drafts[0] == [], "neither text is read yet"
    assert drafts[1] == [3, 8], "its own text is"
