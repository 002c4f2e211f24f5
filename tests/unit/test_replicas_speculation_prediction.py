"""Drafts from the answer that a client predicts."""

from __future__ import annotations

import pytest

from replicas.speculation.prediction import MAX_EVIDENCE, PredictedText, PredictionProposer
from tests.speculation_states import new_state

PREDICTED = [10, 11, 12, 13, 14, 15, 16, 17]


@pytest.mark.parametrize(
    ("answer", "expected", "why"),
    [
        ([], [10, 11, 12], "nothing said yet"),
        ([10, 11], [12, 13, 14], "as predicted"),
        ([99], [], "left at once"),
        ([10, 99, 11], [], "one token is no way back"),
        ([10, 99, 98, 13, 14], [15, 16, 17], "back after two replaced tokens"),
        ([10, 11, 12, 14, 15], [16, 17], "back after a dropped token"),
        ([10, 11, 99, 11, 12], [13, 14, 15], "back after an inserted piece, at an earlier place"),
        (PREDICTED, [], "all said"),
    ],
)
def test_answer_is_followed_through_its_deviations(answer: list[int], expected: list[int], why: str) -> None:
    text = PredictedText(PREDICTED)
    text.follow(answer)
    assert list(text.draft(3).token_ids) == expected, why


def test_place_behind_a_deviation_is_the_next_one_from_there_on() -> None:
    text = PredictedText([1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 7])
    text.follow([1, 2, 3, 4])
    text.follow([9, 1, 2])
    assert list(text.draft(2).token_ids) == [5, 6], "not behind the first 1 2, nor behind the last"


def test_evidence_is_highest_for_an_undisturbed_answer_and_grows_back_after_a_deviation() -> None:
    text = PredictedText([*range(10, 60)])
    text.follow([10, 11])
    assert text.draft(1).evidence == MAX_EVIDENCE
    text.follow([99, 13, 14])
    assert text.draft(1).evidence == (2).bit_length()
    text.follow(range(15, 60))
    assert text.draft(1).evidence == MAX_EVIDENCE


def test_requests_without_prediction_get_no_draft_and_others_their_own() -> None:
    proposer = PredictionProposer()
    states = [
        new_state([1, 2], [10], predicted_ids=PREDICTED),
        new_state([1, 2], [10], name="b"),
        new_state([1, 2], [20, 21], name="c", predicted_ids=[20, 21, 22]),
    ]
    assert [list(draft.token_ids) for draft in proposer.propose(states, [2, 2, 2])] == [[11, 12], [], [22]]
    states[0].append(11)
    states[0].append(12)
    assert [list(draft.token_ids) for draft in proposer.propose(states, [2, 2, 2])] == [[13, 14], [], [22]]
    for state in states:
        proposer.forget(state)
    assert not proposer._places
