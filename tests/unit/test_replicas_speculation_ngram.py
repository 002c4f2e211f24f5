"""n-gram drafts against a search of the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.speculation import ngram
from replicas.speculation.ngram import MAX_N, NgramProposer
from replicas.speculation.proposer import Draft
from tests.speculation_states import new_state


def searched(token_ids: Sequence[int], budget: int) -> list[int]:
    """The tokens behind the latest earlier occurrence of the longest run, up to MAX_N, that ends the text; the text is taken to go on
    as it drafts."""
    for n in range(min(MAX_N, len(token_ids)), 0, -1):
        tail = list(token_ids[-n:])
        for end in range(len(token_ids) - 1, n - 1, -1):
            if list(token_ids[end - n : end]) == tail:
                text = list(token_ids)
                while len(text) < len(token_ids) + budget:
                    text.append(text[end + len(text) - len(token_ids)])
                return text[len(token_ids) :]
    return []


def drafted(token_ids: Sequence[int], budget: int) -> Draft:
    (draft,) = NgramProposer().propose([new_state(token_ids)], [budget])
    return draft


@given(token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=60), budget=st.integers(1, 9))
def test_draft_of_any_text_equals_a_search_of_it(token_ids: list[int], budget: int) -> None:
    assert list(drafted(token_ids, budget).token_ids) == searched(token_ids, budget)


@given(token_ids=st.lists(st.integers(0, 2), min_size=2, max_size=60), data=st.data())
def test_index_kept_up_token_by_token_drafts_the_same(token_ids: list[int], data: st.DataObject) -> None:
    proposer, state = NgramProposer(), new_state(token_ids[:1])
    for token_id in token_ids[1:]:
        state.append(token_id)
        if data.draw(st.booleans()):
            (draft,) = proposer.propose([state], [4])
            assert list(draft.token_ids) == searched(state.token_ids, 4)


@pytest.mark.parametrize(
    ("token_ids", "budget", "expected", "num_equal"),
    [
        ([7, 8, 9, 1, 7, 8], 3, [9, 1, 7], 2),
        ([5, 6, 5, 6, 5], 5, [6, 5, 6, 5, 6], 3),
        ([4, 4, 4], 4, [4, 4, 4, 4], 2),
        ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5, 6], 1, [9], 6),
        ([1, 2, 3], 3, [], 0),
    ],
)
def test_draft_by_hand_with_the_length_of_the_match_as_evidence(
    token_ids: list[int], budget: int, expected: list[int], num_equal: int
) -> None:
    draft = drafted(token_ids, budget)
    assert (list(draft.token_ids), draft.evidence) == (expected, num_equal.bit_length())


def test_long_prompt_is_indexed_over_several_calls_and_drafts_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_INDEXED_TOKENS", 4)
    proposer = NgramProposer()
    states = [new_state([1, 2, 3, 1, 2]), new_state([4, 5, 6, 4], name="b")]
    drafts = [[list(draft.token_ids) for draft in proposer.propose(states, [2, 2])] for _ in range(3)]
    assert drafts == [[[], []], [[3, 1], []], [[3, 1], [5, 6]]]


def test_requests_do_not_draft_from_each_other_and_are_forgotten() -> None:
    proposer = NgramProposer()
    one, other = new_state([1, 2, 3, 1, 2]), new_state([1, 2], name="b")
    first, second = proposer.propose([one, other], [2, 2])
    assert (list(first.token_ids), list(second.token_ids)) == ([3, 1], [])
    proposer.forget(one)
    proposer.forget(one)
    assert proposer._indices.keys() == {other}
