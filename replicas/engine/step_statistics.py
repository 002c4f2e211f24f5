"""Counters and measured rates of an engine, computed from its step outputs. Free of torch."""

from __future__ import annotations

from replicas.request import FinishReason, StepOutput
from replicas.stats import ReplicaStats, smoothed


class StepStatistics:
    """Owns an engine's counters, which only grow, and its rates, which are exponentially weighted means over steps."""

    def __init__(self, max_urgent_share: float = 0.0) -> None:
        self._max_urgent_share = max_urgent_share
        self._prefill_tokens_per_s: float | None = None
        self._undisturbed_tokens_per_s: float | None = None
        self._decode_step_s: float | None = None
        self._num_steps = 0
        self._num_graphed_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_preemptions = 0
        self._num_pauses = 0
        self._num_ended = dict.fromkeys(FinishReason, 0)

    def add(self, output: StepOutput) -> None:
        self._num_preemptions += output.num_preemptions
        self._num_pauses += output.num_paused
        for progress in output.progress:
            self._num_generated_tokens += len(progress.token_ids)
            if progress.finish_reason is not None:
                self._num_ended[progress.finish_reason] += 1
                self._num_cached_tokens += progress.num_cached_tokens
        num_tokens = output.num_prefill_tokens + output.num_decode_tokens
        if num_tokens == 0:
            return
        self._num_steps += 1
        self._num_graphed_steps += output.is_graphed
        self._num_prompt_tokens += output.num_prefill_tokens
        if output.step_s <= 0:
            return
        if output.num_prefill_tokens >= 4 * max(1, output.num_decode_tokens):
            self._undisturbed_tokens_per_s = smoothed(self._undisturbed_tokens_per_s, num_tokens / output.step_s)
        if output.num_paused:
            return  # neither a decode-only step nor what a request sees for which nobody steps aside
        if output.num_prefill_tokens == 0:
            self._decode_step_s = smoothed(self._decode_step_s, output.step_s * _steps_per_token(output))
        elif output.cuts_a_prompt and output.num_decode_tokens:
            # The prompt was held back for decodes: this is the rate that a waiting request sees.
            self._prefill_tokens_per_s = smoothed(self._prefill_tokens_per_s, output.num_prefill_tokens / output.step_s)
        elif output.num_prefill_tokens >= 4 * output.num_decode_tokens:
            # A step with fewer prefill tokens costs about as much as its decodes, so it does not show the prefill rate.
            self._prefill_tokens_per_s = smoothed(self._prefill_tokens_per_s, num_tokens / output.step_s)

    def snapshot(self) -> ReplicaStats:
        """Counters and rates; load and blocks are left at their defaults."""
        ended = self._num_ended
        undisturbed, share = self._undisturbed_tokens_per_s, self._max_urgent_share
        return ReplicaStats(
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            urgent_tokens_per_s=undisturbed * share if undisturbed is not None and share else None,
            decode_step_s=self._decode_step_s,
            num_steps=self._num_steps,
            num_graphed_steps=self._num_graphed_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=self._num_preemptions,
            num_pauses=self._num_pauses,
            num_finished=ended[FinishReason.STOP] + ended[FinishReason.LENGTH] + ended[FinishReason.HANDOFF],
            num_cancelled=ended[FinishReason.CANCELLED],
            num_failed=ended[FinishReason.FAILED],
        )


def _steps_per_token(output: StepOutput) -> float:
    """Below 1 where drafts gave requests several tokens in this step of decodes."""
    num_requests = output.num_decode_tokens - output.num_drafts
    num_tokens = sum(len(progress.token_ids) for progress in output.progress)
    return min(1.0, num_requests / num_tokens) if output.num_drafts and num_tokens else 1.0
