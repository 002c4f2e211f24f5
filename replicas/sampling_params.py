"""How the tokens of one request are drawn. Free of torch: gateway, router and engine share it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from replicas.grammar_spec import GrammarSpec

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request, checked on construction.

    Filters apply in the order repetition/presence/frequency penalties, logit_bias, grammar, temperature, top_k, top_p, min_p
    (the order of transformers' logits warpers), and each filter sees the distribution renormalised by the one before.
    """

    max_tokens: int | None = 16
    """Most tokens to generate; None means up to `max_model_len`. 0 is allowed only with `prompt_logprobs`."""
    min_tokens: int = 0
    """Before this many tokens, EOS and stop tokens have probability zero and stop strings are ignored."""
    temperature: float = 1.0
    """0 is greedy: the most probable token (the lowest id on a tie)."""
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens whose probability is below `min_p` times that of the most probable token."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token already generated (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted once per earlier occurrence in the output (OpenAI)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv 1909.05858)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to the value added to its logit."""
    stop: tuple[str, ...] = ()
    """Stop strings; the text ends before the first match. Applied by the gateway or `LLM`, not by the engine."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of top alternatives reported per token; 0 reports the chosen token alone, None nothing.
    Values are the log-softmax of the model's own logits, before penalties, bias, temperature and filters."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for each prompt token after the first. The whole prompt is then computed: cached KV has no logits."""
    n: int = 1
    """Choices per prompt; each is a separate request under one routing decision."""
    seed: int | None = None
    """The same seed, prompt and settings give the same tokens, whatever else is in the batch (float32)."""
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    """What the text must follow; tokens that would leave it have probability zero. A text that is complete ends with "stop"."""

    def __post_init__(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        _require(self.max_tokens is None or self.max_tokens >= least, "max_tokens", f"at least {least}", self.max_tokens)
        _require(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        _require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "a finite number, at least 0", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(self.top_k >= 0, "top_k", "at least 0 (0 keeps every token)", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]", self.presence_penalty)
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty", "a finite number above 0", self.repetition_penalty)
        _require(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"in [0, {MAX_LOGPROBS}]", self.logprobs)
        _require(
            self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
            "prompt_logprobs",
            f"in [0, {MAX_LOGPROBS}]",
            self.prompt_logprobs,
        )
        _require(self.n >= 1, "n", "at least 1", self.n)
        _require(all(map(math.isfinite, self.logit_bias.values())), "logit_bias", "finite numbers", self.logit_bias)
        _require(all(self.stop), "stop", "non-empty strings", self.stop)

    def for_choice(self, choice: int) -> SamplingParams:
        """Parameters of choice number `choice`. Only choice 0 computes the prompt's log-probabilities, which all choices share, unless
        `max_tokens` is 0."""
        if choice == 0 or self.prompt_logprobs is None or self.max_tokens == 0:
            return self
        return replace(self, prompt_logprobs=None)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _require(holds: bool, name: str, allowed: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
