"""Bad sampling settings are refused on construction, by name."""

import math

import pytest

from replicas.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logprobs", 21),
        ("logprobs", -1),
        ("n", 0),
        ("logit_bias", {3: math.nan}),
        ("stop", ("ok", "")),
    ],
)
def test_params_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be"):
        SamplingParams(**{field: value})


def test_params_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ValueError, match=r"^min_tokens must be at most max_tokens \(4\), got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_params_edge_values_are_accepted():
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, presence_penalty=-2, frequency_penalty=2, logprobs=20, max_tokens=None)


def test_params_defaults_are_neutral():
    params = SamplingParams()
    assert not params.has_penalties
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(presence_penalty=0.1).has_penalties
    assert SamplingParams(frequency_penalty=0.1).has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
