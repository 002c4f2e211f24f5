"""Which decodes step aside while more urgent prompts are computed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from replicas.scheduling.request_state import RequestState
from replicas.scheduling.scheduler_config import SchedulerConfig

LEAST_GAIN = 1 / 8
"""Decodes that are a smaller share of a step's tokens do not step aside: they would lose a token for little."""


class UrgentPauses:
    """Owns when each paused decode began its pause, and how much was computed since.

    A decode pauses only while a prompt of strictly more urgent priority is computed. It keeps its blocks and its place, and gets a token
    in the next step once more urgent work had its share or the pause took too long, however many urgent prompts arrive. Work is counted
    in tokens of a step, so that the share needs no clock.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._since: Mapping[RequestState, tuple[int, float]] = {}  # paused decode -> work and time at which its pause began
        self._work = 0  # tokens computed by all steps in which decodes paused

    def choose(self, running: Sequence[RequestState], now_s: float) -> Collection[RequestState]:
        """The decodes that the next step leaves out. `running` is in order of urgency; `now_s` comes from a clock that never goes back."""
        began, self._since = self._since, {}
        share = self._config.max_urgent_share
        if share == 0 or not running or running[0].request.priority == running[-1].request.priority:
            return ()
        prompts = [state for state in running if not (state.is_decoding or state.is_held)]
        if not prompts:
            return ()
        most_urgent = prompts[0].request.priority
        paused = [state for state in running if state.is_decoding and state.request.priority > most_urgent]
        others = [state for state in running if state.is_decoding and state.request.priority <= most_urgent]
        num_paused_tokens = sum(state.num_uncomputed_tokens for state in paused)
        if num_paused_tokens < LEAST_GAIN * (num_paused_tokens + self._num_left_tokens(paused, prompts, others)):
            return ()
        # Together they get 1 - share of the work: the more wait for their token, the longer the pause that pays for them.
        allowed_work = num_paused_tokens * share / (1 - share)
        here = (self._work, now_s)
        since = {state: began.get(state, here) for state in paused}
        self._since = {
            state: (work, at_s)
            for state, (work, at_s) in since.items()
            if self._work - work < allowed_work and now_s - at_s < self._config.max_urgent_pause_s
        }
        return self._since.keys()

    def note_step(self, num_tokens: int) -> None:
        """Counts the tokens of the step that was planned after `choose`."""
        if self._since:
            self._work += num_tokens

    def _num_left_tokens(self, paused: Sequence[RequestState], prompts: Sequence[RequestState], others: Sequence[RequestState]) -> int:
        """Tokens of the step without `paused`, about."""
        config = self._config
        budget = config.max_num_batched_tokens
        if config.max_num_mixed_tokens is not None and any(state.num_output_tokens for state in others):
            budget = config.max_num_mixed_tokens
        priority = min((state.request.priority for state in paused), default=0)
        urgent = [*others, *(state for state in prompts if state.request.priority < priority)]
        return min(budget, sum(state.num_uncomputed_tokens for state in urgent))
