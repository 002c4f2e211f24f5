"""What follows one answer through its grammar, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class GrammarMatcher(Protocol):
    """Which tokens may come next in one answer. It knows nothing but the tokens given to `accept`: a matcher that is made anew and gets
    the same tokens has the same state.

    One thread at a time; `fill` may run on another thread than `accept`, and releases the interpreter's lock.
    """

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Writes which tokens are allowed next: bit `i % 32` of word `i // 32` for token `i`, (V + 31) // 32 words for V rows of logits.

        At least one token is allowed unless there is an `error`. EOS tokens are allowed exactly where the text `may_end`.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Goes on by one token. False if its text is not allowed, which leaves an `error`. An EOS token may be given where the text
        `may_end`; it counts as a token for `rollback`.

        Takes every token that `fill` allows, and also the other ways to cut an allowed text into tokens."""
        ...

    def accept_all(self, token_ids: Sequence[int]) -> int:
        """Goes on by the longest allowed prefix, and returns its length. A token that is not allowed leaves no error."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last accepted tokens, exactly. Raises ValueError for more than were accepted."""
        ...

    def forced_tokens(self) -> list[int]:
        """Tokens that follow with certainty: at each of them exactly one token is allowed. Empty if there is a choice, or at the end."""
        ...

    @property
    def num_tokens(self) -> int:
        """How many tokens were accepted and not taken back."""
        ...

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete."""
        ...

    @property
    def must_end(self) -> bool:
        """Whether the text is complete and nothing but EOS can follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the matcher can go no further (a token that was not allowed, a limit), in one line. It stays: the request has failed, and
        must never end as if its text were complete. None: no error."""
        ...
