"""The token ids of a draft model in terms of the target's. Letters: V the target's vocabulary, C tokens that both models have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MIN_SHARED = 0.5
"""A draft model that lacks more of the target's tokens than half is rejected."""


class Vocabulary(Protocol):
    """A tokenizer's."""

    special_token_ids: frozenset[int]

    def token(self, token_id: int) -> str | None: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class ForeignVocabulary(ValueError):
    """The draft model has too few of the target's tokens. One line; not raised for other ids or a few tokens more or less."""


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Maps token by token, whatever the ids: text is never encoded anew. A token that the draft model lacks is shown to it as
    `unknown_id` and never drafted; that costs accepted drafts, nothing else."""

    token_ids_C: Tensor
    """The target's ids, ascending."""
    draft_ids_C: Tensor
    """The draft model's ids of the same tokens."""
    draft_ids_V: tuple[int, ...]
    """The draft model's id of each of the target's."""
    is_identity: bool
    """Whether every shared token has the same id in both."""

    @classmethod
    def between(cls, target: Vocabulary, num_target: int, draft: Vocabulary, num_draft: int, unknown_id: int = 0) -> TokenMap:
        """The sizes are those of the models' output layers. Tokens are equal if they stand for the same bytes, or are special and have the
        same name. Raises ForeignVocabulary."""
        by_meaning: dict[tuple[bool, bytes], int] = {}
        for draft_id in range(num_draft):
            if (meaning := _meaning(draft, draft_id)) is not None:
                by_meaning.setdefault(meaning, draft_id)
        token_ids: list[int] = []
        draft_ids_V = [unknown_id] * num_target
        num_tokens = 0
        for token_id in range(num_target):
            if (meaning := _meaning(target, token_id)) is not None:
                num_tokens += 1
                # Several ids may stand for the same bytes: the same id is the better guess.
                found = token_id if token_id < num_draft and _meaning(draft, token_id) == meaning else by_meaning.get(meaning)
                if found is not None:
                    token_ids.append(token_id)
                    draft_ids_V[token_id] = found
        if len(token_ids) < MIN_SHARED * num_tokens:
            raise ForeignVocabulary(
                f"the draft model has {len(token_ids)} of the target's {num_tokens} tokens; use a draft model of the same family"
            )
        draft_ids = [draft_ids_V[token_id] for token_id in token_ids]
        return cls(torch.tensor(token_ids), torch.tensor(draft_ids), tuple(draft_ids_V), token_ids == draft_ids)

    def to_draft(self, token_ids: Sequence[int]) -> Sequence[int]:
        return [self.draft_ids_V[token_id] for token_id in token_ids]


def _meaning(vocabulary: Vocabulary, token_id: int) -> tuple[bool, bytes] | None:
    if vocabulary.token(token_id) is None:
        return None
    return token_id in vocabulary.special_token_ids, vocabulary.token_bytes(token_id)
