"""How many tokens are drafted: by hand, against a search of all choices, and bounds of what trials cost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.speculation.acceptance import Acceptance, OwnAcceptance
from replicas.speculation.controller import LOOK_SHARE, PROBE_SHARE, PROBE_TOKENS, Controller, Offer, Outlook
from replicas.speculation.step_cost import StepCost
from tests.speculation_states import new_state

KIND = ("ngram", 2)


def cost(*row_s: float, context_s: float = 0.0) -> StepCost:
    return StepCost(num_rows=tuple(range(1, len(row_s) + 1)), row_s=row_s, context_s=context_s)


def offers(*survivals: list[float], num_context_tokens: int = 0) -> list[Offer]:
    return [Offer(kind=KIND, survival=survival, num_context_tokens=num_context_tokens) for survival in survivals]


@pytest.mark.parametrize(("num_rows", "seconds"), [(1, 4.0), (2, 5.0), (3, 5.5), (4, 6.0), (8, 10.0), (0, 4.0), (10, 12.0)])
def test_cost_is_linear_between_the_measured_rows_and_beyond_them(num_rows: int, seconds: float) -> None:
    measured = StepCost(num_rows=(1, 2, 4, 8), row_s=(4.0, 5.0, 6.0, 10.0))
    assert measured.seconds(num_rows) == pytest.approx(seconds)


def test_noise_that_makes_more_rows_look_faster_is_taken_out() -> None:
    assert StepCost.measured((1, 2, 3, 4), (4.4, 4.0, 5.0, 4.8), -1e-9) == cost(4.0, 4.0, 4.8, 4.8)


def test_cost_needs_as_many_seconds_as_rows() -> None:
    with pytest.raises(ValueError, match="as many seconds"):
        StepCost(num_rows=(1, 2), row_s=(1.0,))


def test_acceptance_by_hand_counts_a_draft_only_if_all_before_it_were_accepted() -> None:
    acceptance, own = Acceptance(), OwnAcceptance()
    assert acceptance.survival(own, KIND, 3) == [0.5, 0.25, 0.125], "nothing known"
    acceptance.note(own, KIND, 3, 1)  # the first accepted, the second refused, the third not tried
    shared = [(1 * 0.98 + 1) / (2 * 0.98 + 1), (1 * 0.98) / (2 * 0.98 + 1), 1 / 2]
    mine = [(1 + 2 * shared[0]) / 3, 2 * shared[1] / 3, shared[2]]
    expected = list(itertools.accumulate(mine, lambda chance, rate: chance * rate))
    assert acceptance.survival(own, KIND, 3) == pytest.approx(expected)
    assert acceptance.survival(OwnAcceptance(), KIND, 1) == pytest.approx(shared[:1]), "another request expects what all have shown"
    assert acceptance.survival(own, ("ngram", 1), 1) == [0.5], "other evidence"
    assert acceptance.best_rate("ngram") == pytest.approx(shared[0])
    assert acceptance.best_rate("suffix") == 0.5


@pytest.mark.parametrize(
    ("row_s", "survivals", "expected"),
    [
        ((4.0, 4.4, 4.8, 5.2), [[0.9, 0.81, 0.73]], [3]),
        ((4.0, 4.4, 4.8, 5.2), [[0.5, 0.25, 0.12]], [2]),  # 1.5 / 4.4, 1.75 / 4.8, 1.87 / 5.2
        ((4.0, 8.0, 12.0, 16.0), [[0.9, 0.81, 0.73]], [0]),
        ((4.0, 6.0, 6.0, 6.0), [[0.4, 0.35, 0.3]], [3]),  # the first draft alone does not pay: kernels work on four rows at once
        ((4.0, 4.0, 8.0), [[0.01, 0.01]], [1]),
        ((), [[]], [0]),
    ],
)
def test_number_of_drafts_by_hand(row_s: tuple[float, ...], survivals: list[list[float]], expected: list[int]) -> None:
    controller = Controller(cost(*row_s) if row_s else cost(1.0))
    assert controller.choose(1, offers(*survivals), 100) == expected


@given(
    steps=st.lists(st.floats(0.0, 1.0), min_size=9, max_size=9),
    rates=st.lists(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=3), min_size=1, max_size=2),
    budget=st.integers(0, 6),
)
def test_choice_is_as_good_as_the_best_of_all(steps: list[float], rates: list[list[float]], budget: int) -> None:
    seconds = list(itertools.accumulate([1.0, *steps]))
    controller = Controller(cost(*seconds))
    survivals = [list(itertools.accumulate(chain, lambda a, b: a * b)) for chain in rates]
    num_rows = len(survivals)

    def rate(lengths: list[int]) -> float:
        gained = sum(sum(chances[:length]) for chances, length in zip(survivals, lengths, strict=True))
        return (num_rows + gained) / seconds[num_rows + sum(lengths) - 1]

    chosen = controller.choose(num_rows, offers(*survivals), budget)
    every = itertools.product(*(range(len(chances) + 1) for chances in survivals))
    assert sum(chosen) <= budget
    assert rate(chosen) == pytest.approx(max(rate(list(lengths)) for lengths in every if sum(lengths) <= budget))


def test_long_context_makes_drafts_dear() -> None:
    controller = Controller(cost(4.0, 4.1, 4.2, context_s=0.001))
    assert controller.choose(1, offers([0.5, 0.4], num_context_tokens=100), 9) == [2]
    assert controller.choose(1, offers([0.5, 0.4], num_context_tokens=3000), 9) == [0]


def test_steps_that_take_longer_with_drafts_than_predicted_get_fewer() -> None:
    controller = Controller(cost(4.0, 4.4))
    assert controller.choose(1, offers([0.4]), 9) == [1]
    for _ in range(20):
        controller.note_step(1, 0, 0, 8.0)  # the machine is half as fast as when it was measured: nothing changes
        controller.note_step(1, 1, 0, 8.8)
    assert controller.choose(1, offers([0.4]), 9) == [1]
    for _ in range(20):
        controller.note_step(1, 1, 0, 8.8 * 1.5)
    assert controller.choose(1, offers([0.4]), 9) == [0]


def test_prompt_tokens_count_as_much_as_drafts_so_that_prompts_are_not_slowed_down() -> None:
    controller = Controller(StepCost(num_rows=(1, 2, 100), row_s=(4.0, 4.4, 43.6)))
    assert controller.choose(1, offers([0.6]), 9) == [1]
    assert controller.choose(80, offers([0.6]), 9) == [0]


def test_probes_stay_within_their_share_of_all_steps() -> None:
    controller = Controller(cost(4.0, 8.0))
    state, outlook = new_state([1] * 10), Outlook(10)
    num_probes = num_steps = 0
    for _ in range(4000):
        controller.begin_step(1)
        num_steps += 1
        state.append(5)
        if controller.try_probe(state, outlook, 1):
            num_probes += 1
            outlook.drafted_at = len(state.token_ids)
    assert 0 < num_probes * 4.0 <= PROBE_SHARE * num_steps * 4.0
    assert num_probes == pytest.approx(PROBE_SHARE * num_steps, abs=1), "each costs as much as a step"


def test_probe_is_due_a_while_after_the_last_draft() -> None:
    controller = Controller(cost(4.0, 4.001))
    state, outlook = new_state([1] * 10), Outlook(10)
    for _ in range(PROBE_TOKENS - 1):
        controller.begin_step(1)
        state.append(5)
    assert not controller.try_probe(state, outlook, 1)
    state.append(5)
    assert controller.try_probe(state, outlook, 1)


def test_looks_that_find_nothing_useful_take_their_share_of_a_step_in_turns() -> None:
    controller = Controller(cost(*[4.0] * 64))
    requests = [(new_state([1], name=f"r{i}"), Outlook(1)) for i in range(40)]
    controller.note_looks(10, 10 * 4.0 * LOOK_SHARE / 5.5)  # five fit into a step
    controller.begin_step(40)
    assert controller.worth_a_look(requests, 40, ["ngram"]) == list(range(40)), "new requests are all asked"
    turns = []
    for _ in range(8):
        controller.begin_step(40)
        turns.append(controller.worth_a_look(requests, 40, ["ngram"]))
    assert all(len(turn) == 5 for turn in turns)
    assert sorted(index for turn in turns for index in turn) == list(range(40))


def test_nobody_is_asked_where_not_even_the_best_draft_could_pay() -> None:
    controller = Controller(cost(4.0, 8.0))
    state, outlook = new_state([1] * 10), Outlook(10)
    assert controller.worth_a_look([(state, outlook)], 1, ["ngram"]) == []
    for _ in range(PROBE_TOKENS):
        state.append(5)
    assert controller.worth_a_look([(state, outlook)], 1, ["ngram"]) == [0], "a probe is due"


@pytest.mark.parametrize(("pass_s", "expected"), [(0.0, 3), (0.5, 2), (4.0, 0)])
def test_model_drafts_as_long_as_its_passes_pay(pass_s: float, expected: int) -> None:
    controller = Controller(cost(4.0, 4.1, 4.2, 4.3))
    controller.note_model(1, 2, 2 * pass_s)
    assert controller.drafts_of_model(1, offers([0.6, 0.36, 0.216])) == expected


def test_model_that_never_drafted_is_tried_and_a_dear_one_only_when_its_purse_allows() -> None:
    controller = Controller(cost(4.0, 4.1))
    assert controller.drafts_of_model(1, offers([0.5])) == 1
    controller.note_model(1, 1, 8.0)
    state, outlook = new_state([1] * 10), Outlook(10)
    for _ in range(PROBE_TOKENS):
        state.append(5)
    assert controller.try_probe_of_model([(state, outlook)], 1) == []
    for _ in range(500):
        controller.begin_step(1)
    assert controller.try_probe_of_model([(state, outlook)], 1) == [], "the purse holds no more than a step, and a pass costs two"
    controller.note_model(1, 1, 0.0)
    for _ in range(8):
        controller.note_model(1, 1, 0.0)
    assert controller.try_probe_of_model([(state, outlook)], 1) == [0]
