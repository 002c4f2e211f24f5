"""Settings of speculation, and vLLM's spelling of them."""

from __future__ import annotations

import logging

import pytest

from replicas.speculation_config import SpeculationConfig, from_vllm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "method must be one of none, auto, ngram"),
        ({"method": "early_exit"}, "method 'early_exit' is not supported: it needs models that were trained for it"),
        ({"method": "ngram", "max_tokens": 0}, "max_tokens must be from 1 to 64, got 0; use method none"),
        ({"method": "eagle"}, "method 'eagle' needs model"),
        ({"method": "suffix", "model": "folder"}, "model is for the methods draft_model, eagle, medusa and auto"),
        ({"method": "twin", "twin": "fp8"}, "twin must be int8 or int4, got 'fp8'"),
        ({"method": "suffix", "max_suffix_tokens": -1}, "max_suffix_tokens must be at least 0"),
    ],
)
def test_wrong_setting_is_named_with_what_is_allowed(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(**settings)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram", "num_speculative_tokens": 5}, SpeculationConfig(method="ngram", max_tokens=5)),
        ({"model": "[ngram]", "num_speculative_tokens": 3}, SpeculationConfig(method="ngram", max_tokens=3)),
        ({"method": "eagle3", "model": "head"}, SpeculationConfig(method="eagle", model="head")),
        ({"model": "small", "num_speculative_tokens": 4}, SpeculationConfig(method="draft_model", model="small", max_tokens=4)),
        ({"method": "suffix", "rejection_sample_method": "strict"}, SpeculationConfig(method="suffix")),
    ],
)
def test_vllm_spelling_becomes_the_same_settings(given: dict[str, object], expected: SpeculationConfig) -> None:
    assert from_vllm(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngram", "acceptance_method": "typical_acceptance_sampler"}, "acceptance_method: 'typical.* never change the output"),
        ({"method": "medusa", "model": "m", "posterior_threshold": 0.1}, "posterior_threshold: 0.1 is not supported"),
        ({"method": "ngram", "num_tokens": 3}, "num_tokens: unknown key"),
        ({"method": "mtp"}, "method 'mtp' is not supported: the model families that have such modules are not served"),
        ({"method": "magic"}, "method must be one of ngram"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 100}, "speculative_config: max_tokens must be from 1 to 64"),
        ({}, "method must be one of"),
    ],
)
def test_vllm_key_that_is_unknown_or_inexact_is_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_vllm(given)


def test_vllm_tuning_is_taken_with_a_warning_that_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert from_vllm({"method": "ngram", "prompt_lookup_max": 4}) == SpeculationConfig(method="ngram")
    assert "prompt_lookup_max have no effect" in caplog.text
