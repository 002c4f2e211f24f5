"""Whether anybody still wants drafts. Hidden states that no draft uses would slow down every step. Free of torch."""

from __future__ import annotations

RESTING_STEPS = 64
"""Steps without a wish for drafts after which nothing is kept for them. Longer than the controller waits between two trials."""
TRIALS = 8
"""Of so many single wishes, one opens RESTING_STEPS steps, in which the next is served; the others do not keep a head awake."""
_DEMAND_STEPS = 2
"""Wishes at most so many steps apart are no trials of the controller: drafts are in use."""


class Interest:
    """Follows the wishes for drafts of all requests of a proposer together."""

    def __init__(self) -> None:
        self._num_left = RESTING_STEPS  # steps that still keep hidden states
        self._num_since_wish = RESTING_STEPS
        self._num_trials = 0

    def note_wish(self) -> None:
        is_trial = self._num_since_wish > _DEMAND_STEPS
        if not is_trial or self._num_trials % TRIALS == 0:
            self._num_left = RESTING_STEPS
        elif self._num_trials % TRIALS == 1:
            self._num_left = _DEMAND_STEPS  # it was served: rest unless there is more
        self._num_trials = self._num_trials + 1 if is_trial else 0
        self._num_since_wish = 0

    def note_step(self) -> bool:
        """Called once a step; False if the step need not keep anything."""
        self._num_since_wish += 1
        self._num_left -= 1
        return self._num_left >= 0
