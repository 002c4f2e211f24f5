"""The sampler against exact distributions, transformers' own processors and hand calculation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from replicas.native.build import load_native_library
from replicas.sampling.native_draw import NativeDraw
from replicas.sampling.philox import uniforms
from replicas.sampling.sampler import Sampler, filtered_probs, forbidden_tokens, inverse_cdf
from tests.unit.growing_state import state
from tests.unit.hand_grammar import FakeMask, packed
from tests.unit.random_logits import random_logits


@pytest.fixture(scope="module")
def compiled():
    return NativeDraw(load_native_library())


@pytest.fixture(scope="module", params=["torch", "compiled"])
def native(request, compiled):
    """What draws: the reference, or the compiled kernel."""
    return compiled if request.param == "compiled" else None


def exact_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """float64, by definition: filter, renormalise, next filter. `logits` has no ties."""
    probs = np.exp((logits - logits.max()) / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    if top_k:
        probs[order[top_k:]] = 0
        probs /= probs.sum()
    if top_p < 1:
        num_kept = int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1
        probs[order[num_kept:]] = 0
        probs /= probs.sum()
    if min_p:
        probs[probs < min_p * probs.max()] = 0
        probs /= probs.sum()
    return probs


COMBINATIONS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_sample_20000_draws_follow_the_exact_distribution(native, combination):
    """200 seeds, 100 positions each; rare tokens are pooled so that every expected count is at least 5."""
    vocab = 40
    logits = random_logits(1, vocab, seed=5, scale=1.5)
    sampler = Sampler(vocab, native)
    states = [state(seed=1000 + seed, **combination) for seed in range(200)]
    counts = np.zeros(vocab)
    for _ in range(100):
        for one, token_id in zip(states, sampler.sample(logits.expand(200, -1), states).token_ids, strict=True):
            counts[token_id] += 1
            one.append(token_id)
    probs = exact_distribution(logits[0].double().numpy(), **combination)
    assert counts[probs == 0].sum() == 0
    expected = 20_000 * probs
    common = expected >= 5
    observed, wanted = counts[common], expected[common]
    if (~common).any() and expected[~common].sum() >= 5:
        observed, wanted = np.append(observed, counts[~common].sum()), np.append(wanted, expected[~common].sum())
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 0.001


def test_sample_choices_of_one_seed_follow_the_exact_distribution(native):
    logits = random_logits(1, 40, seed=6, scale=1.0)
    states = [state(seed=3, choice=choice) for choice in range(20_000)]
    counts = np.bincount(Sampler(40, native).sample(logits.expand(20_000, -1), states).token_ids, minlength=40)
    expected = 20_000 * exact_distribution(logits[0].double().numpy())
    assert expected.min() >= 5
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 0.001


def kept(logits, **settings_):
    return filtered_probs(logits.clone(), [state(**settings_)] * len(logits))


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize(
    ("settings_", "warpers"),
    [
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"top_k": 17}, [TopKLogitsWarper(17)]),
        ({"top_k": 10_000}, []),
        ({"top_p": 0.1}, [TopPLogitsWarper(0.1)]),
        ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
        ({"top_p": 0.999}, [TopPLogitsWarper(0.999)]),
        ({"min_p": 0.03}, [MinPLogitsWarper(0.03)]),
        ({"min_p": 1.0}, [MinPLogitsWarper(1.0)]),
        (
            {"temperature": 1.4, "top_k": 40, "top_p": 0.85, "min_p": 0.02},
            [TemperatureLogitsWarper(1.4), TopKLogitsWarper(40), TopPLogitsWarper(0.85), MinPLogitsWarper(0.02)],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_filters_equal_transformers_warpers(vocab, settings_, warpers):
    """A scale near 0 makes flat rows, whose top_p set is larger than the candidates looked at first."""
    for scale in (0.05, 1.0, 4.0):
        logits = random_logits(8, vocab, seed=vocab, scale=scale)
        expected = logits.clone()
        for warper in warpers:
            expected = warper(None, expected)
        probs = kept(logits, **settings_)
        assert torch.equal(probs > 0, expected.softmax(-1) > 0)
        torch.testing.assert_close(probs / probs.sum(-1, keepdim=True), expected.softmax(-1), rtol=1e-4, atol=1e-7)


def only(allowed, vocab_size=4):
    return FakeMask(lambda tokens: allowed, vocab_size)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mask_allows_only_its_tokens(native, temperature):
    states = [state(mask=only([2]), temperature=temperature), state(temperature=0.0)]
    assert Sampler(4, native).sample(torch.tensor([[9.0, 8.0, -5.0, 1.0]] * 2), states).token_ids == [2, 0]


def test_mask_comes_behind_penalties_and_bias_and_before_top_k(native):
    """Of the allowed tokens 1, 2 and 3 the bias makes 3 the best; were the mask behind top_k, nothing would be left of the row."""
    logits = torch.tensor([[9.0, 2.0, 1.0, 0.5]])
    states = [state(seed=seed, mask=only([1, 2, 3]), temperature=1.0, top_k=1, logit_bias={3: 5.0}) for seed in range(20)]
    assert Sampler(4, native).sample(logits.expand(20, 4), states).token_ids == [3] * 20


def test_mask_of_every_word_boundary_allows_exactly_its_tokens(native):
    """80 tokens are two and a half words; the highest bit of a word is the sign of an int32."""
    for token_id in (0, 31, 32, 63, 64, 79):
        sampled = Sampler(80, native).sample(torch.zeros(2, 80), [state(mask=only([token_id], 80)), state(temperature=0.0)])
        assert sampled.token_ids[0] == token_id


def test_masks_unpacked_as_on_a_device_forbid_all_tokens_without_a_bit():
    words = np.stack([packed(allowed, 80) for allowed in ([0, 31, 79], range(80), [32])])
    forbidden = forbidden_tokens(torch.from_numpy(words), 80)
    assert [[token for token in range(80) if not row[token]] for row in forbidden.tolist()] == [[0, 31, 79], list(range(80)), [32]]


def test_mask_that_breaks_while_it_is_computed_fails_its_row_alone(native):
    mask = only([2])
    mask.error = "the grammar became too complex"
    sampled = Sampler(4, native).sample(random_logits(2, 4), [state(mask=mask), state()])
    assert sampled.errors == {0: "the grammar became too complex"}


@pytest.mark.parametrize(
    ("settings_", "allowed", "expected"),
    [
        ({"min_tokens": 3, "stop_token_ids": (1,)}, [0, 1, 2], [2]),
        ({"min_tokens": 3, "stop_token_ids": (1,)}, [0, 1], [0, 1]),
        ({"ignore_eos": True}, [0, 2], [2]),
        ({"ignore_eos": True}, [0], [0]),
        ({}, [0, 2], [0, 2]),
    ],
    ids=["min_tokens", "min_tokens leaves none", "ignore_eos", "only EOS is left", "free to end"],
)
def test_eos_and_stop_tokens_are_taken_from_a_mask_unless_nothing_else_is_left(settings_, allowed, expected):
    """Token 0 is EOS. A row without any token would give NaN."""
    words = state(eos=(0,), mask=only(allowed), **settings_).allowed_words()
    assert np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() == expected


def test_logprobs_equal_log_softmax_of_the_raw_logits():
    logits = random_logits(2, 100)
    states = [
        state(temperature=0, logprobs=3, logit_bias={11: 100.0}, repetition_penalty=1.5, prompt=[1, 2]),
        state(temperature=0.5, top_k=2, logprobs=0),
    ]
    sampled = Sampler(100).sample(logits, states)
    expected = torch.log_softmax(logits, -1)
    assert sampled.token_ids[0] == 11
    for row, logprob in enumerate(sampled.logprobs):
        assert logprob.token_id == sampled.token_ids[row]
        assert logprob.logprob == pytest.approx(expected[row, logprob.token_id].item(), abs=1e-6)
    best = expected[0].topk(3)
    assert [token_id for token_id, _ in sampled.logprobs[0].top] == best.indices.tolist()
    assert [value for _, value in sampled.logprobs[0].top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert sampled.logprobs[1].top == ()


def test_logprobs_more_than_the_vocabulary_gives_all_of_it():
    assert len(Sampler(5).sample(random_logits(1, 5), [state(logprobs=20)]).logprobs[0].top) == 5


def test_greedy_tie_takes_the_lowest_id_plain_or_not():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0]] * 2)
    assert Sampler(4).sample(logits, [state(temperature=0), state(temperature=0, logprobs=1)]).token_ids == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample_leaves_the_logits_alone(dtype):
    logits = random_logits(3, 30).to(dtype)
    before = logits.clone()
    Sampler(30).sample(logits, [state(temperature=0), state(top_k=3, min_p=0.1), state(repetition_penalty=2.0, prompt=[1])])
    assert torch.equal(logits, before)


def test_greedy_batch_makes_no_copy_of_the_logits(monkeypatch):
    """Nothing of the size of the logits is made: float32 is asked for one value a row only."""
    sizes = []
    original = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: sizes.append(self.numel()) or original(self))
    Sampler(1000).sample(random_logits(4, 1000).bfloat16(), [state(temperature=0)] * 4)
    assert sizes == [4]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("settings_", [{"temperature": 0}, {}, {"temperature": 0, "logprobs": 2}, {"top_p": 0.5, "logprobs": 2}], ids=str)
def test_logits_not_finite_fail_that_row_only(native, bad, settings_):
    logits = random_logits(3, 20)
    states = [state(seed=row, **settings_) for row in range(3)]
    good = Sampler(20, native).sample(logits, states)
    spoilt = logits.clone()
    spoilt[1, 7] = bad
    sampled = Sampler(20, native).sample(spoilt, states)
    assert set(sampled.errors) == {1}
    assert "not finite" in sampled.errors[1]
    assert [sampled.token_ids[row] for row in (0, 2)] == [good.token_ids[row] for row in (0, 2)]
    assert [sampled.logprobs[row] for row in (0, 2)] == [good.logprobs[row] for row in (0, 2)]
    assert sampled.logprobs[1] is None


def test_every_token_masked_fails_that_row_only(native):
    sampled = Sampler(4, native).sample(random_logits(2, 4), [state(mask=only([])), state()])
    assert set(sampled.errors) == {0}
    assert "no token is allowed" in sampled.errors[0]


def test_minus_infinity_in_the_logits_is_never_drawn(native):
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    drawn = {Sampler(4, native).sample(logits, [state(seed=seed)]).token_ids[0] for seed in range(60)}
    assert drawn == {0, 2}


@pytest.mark.parametrize("temperature", [1e-45, 1e-320, 1e-6])
def test_tiny_temperature_takes_the_most_probable(native, temperature):
    assert Sampler(3, native).sample(torch.tensor([[1.0, 30.0, 2.0]]), [state(temperature=temperature)]).token_ids == [1]


def test_huge_temperature_is_uniform_over_what_is_left():
    logits = torch.tensor([[1.0, 30.0, -math.inf]])
    assert kept(logits, temperature=1e300).tolist() == [[0.5, 0.5, 0.0]]


def test_stop_id_outside_the_vocabulary_is_harmless():
    assert Sampler(3).sample(torch.tensor([[1.0, 3.0, 2.0]]), [state(stop_token_ids=(99,), min_tokens=1, temperature=0)]).token_ids == [1]


@pytest.mark.parametrize("vocab", [1, 1023, 1024, 5000])
def test_compiled_argmax_takes_the_first_of_equal_logits(compiled, vocab):
    logits = random_logits(20, vocab).round()
    rows = list(range(19, -1, -2))
    assert compiled.argmax(logits, rows) == [logits[row].tolist().index(float(logits[row].max())) for row in rows]


def test_sample_without_rows_is_empty(native):
    assert Sampler(3, native).sample(torch.empty(0, 3), []).token_ids == []


settings_strategy = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 5, 300, 5000]),
        "top_p": st.sampled_from([0.1, 0.9, 0.9999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, -0.4]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "logprobs": st.sampled_from([None, 0, 5]),
        "min_tokens": st.sampled_from([0, 4]),
        "logit_bias": st.sampled_from([{}, {3: 2.0, 5: -100.0}]),
    },
)
rows_strategy = st.lists(
    st.tuples(settings_strategy, st.integers(0, 2**64), st.lists(st.integers(0, 99), max_size=5)), min_size=2, max_size=9
)


@settings(max_examples=60, deadline=None)
@given(rows=rows_strategy, logits_seed=st.integers(0, 100), is_flat=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_row_in_a_batch_equals_the_row_alone(native, rows, logits_seed, is_flat, dtype):
    vocab = 2003
    logits = random_logits(len(rows), vocab, seed=logits_seed, scale=0.1 if is_flat else 3.0).to(dtype)

    def states():
        return [state(seed=seed, prompt=[1, 2], output=output, eos=[0], **one) for one, seed, output in rows]

    batch = Sampler(vocab, native).sample(logits, states())
    for row, one in enumerate(states()):
        alone = Sampler(vocab, native).sample(logits[row : row + 1], [one])
        assert (alone.token_ids[0], alone.logprobs[0]) == (batch.token_ids[row], batch.logprobs[row])


def test_large_vocabulary_row_in_a_batch_equals_the_row_alone(native):
    """Long rows are where torch splits one reduction over threads."""
    vocab = 150_001
    logits = random_logits(5, vocab, scale=2.0)
    variants = [{}, {"top_p": 0.95}, {"top_k": 50, "temperature": 0.8}, {"min_p": 0.001}, {"logprobs": 5}]
    batch = Sampler(vocab, native).sample(logits, [state(seed=9, **one) for one in variants])
    for row, one in enumerate(variants):
        alone = Sampler(vocab, native).sample(logits[row : row + 1], [state(seed=9, **one)])
        assert (alone.token_ids[0], alone.logprobs[0]) == (batch.token_ids[row], batch.logprobs[row])


@pytest.mark.parametrize("vocab", [3, 64, 200, 1000])
def test_inverse_cdf_equals_a_plain_search(vocab):
    probs = random_logits(50, vocab, scale=2.0).softmax(-1)
    probs[:, ::3] = 0
    draws = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = inverse_cdf(probs, draws).tolist()
    for row, draw in enumerate(draws.tolist()):
        cdf = np.cumsum(probs[row].double().numpy())
        assert found[row] == int(np.searchsorted(cdf, draw * cdf[-1], side="right"))


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-53])
def test_inverse_cdf_extreme_draw_returns_a_token_that_is_not_dropped(draw):
    probs = torch.zeros(1, 500)
    probs[0, [70, 71, 300]] = torch.tensor([0.1, 0.2, 0.7])
    assert inverse_cdf(probs, torch.tensor([draw], dtype=torch.float64)).item() == (70 if draw == 0 else 300)


@settings(max_examples=40, deadline=None)
@given(
    vocab=st.sampled_from([2, 63, 64, 65, 3000]), scale=st.sampled_from([0.0, 0.05, 1.0, 4.0, 30.0]),
    temperature=st.sampled_from([1e-6, 0.3, 1.0, 5.0]), top_k=st.sampled_from([0, 1, 2, 40, 64, 2999]),
    top_p=st.sampled_from([0.001, 0.5, 0.95, 0.9999, 1.0]), min_p=st.sampled_from([0.0, 0.02, 1.0]), num_banned=st.sampled_from([0, 1]),
)  # fmt: skip
def test_compiled_draw_equals_the_reference(compiled, vocab, scale, temperature, top_k, top_p, min_p, num_banned):
    """Where the reference's CDF passes the uniform number, within what float32 weights leave open."""
    logits = random_logits(1, vocab, seed=vocab, scale=scale)
    logits[0, :num_banned] = -math.inf
    states = [state(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) for seed in range(64)]
    found = compiled.draw(logits, [0] * len(states), states)
    probs = filtered_probs(logits.clone(), states[:1])[0].double().numpy()
    cdf = np.cumsum(probs) / probs.sum()
    draws = uniforms([one.seed for one in states], [0] * len(states), [0] * len(states))
    for token_id, draw in zip(found, draws, strict=True):
        assert probs[token_id] > 0
        assert cdf[token_id] - probs[token_id] / probs.sum() - 1e-5 <= draw <= cdf[token_id] + 1e-5


@pytest.mark.parametrize("k", [1, 2, 7, 50, 700, 3999])
def test_compiled_top_k_keeps_exactly_the_best(compiled, k):
    logits = random_logits(1, 4000, seed=k)
    states = [state(seed=seed, temperature=1e6, top_k=k) for seed in range(8 * k if k < 100 else 400)]  # uniform over what is kept
    found = set(compiled.draw(logits, [0] * len(states), states))
    best = set(logits[0].topk(k).indices.tolist())
    assert found <= best
    assert k > 10 or found == best
