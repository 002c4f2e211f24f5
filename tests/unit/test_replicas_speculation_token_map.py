"""The ids of a draft model's tokens in the target's vocabulary."""

from __future__ import annotations

import pytest

from replicas.speculation.drafting.token_map import ForeignVocabulary, TokenMap


class Words:
    """A vocabulary of these tokens; None is an id without one."""

    def __init__(self, tokens: list[str | None], special: tuple[int, ...] = ()) -> None:
        self._tokens = tokens
        self.special_token_ids = frozenset(special)

    def token(self, token_id: int) -> str | None:
        return self._tokens[token_id] if token_id < len(self._tokens) else None

    def token_bytes(self, token_id: int) -> bytes:
        return (self.token(token_id) or "").replace("▁", " ").replace("Ġ", " ").encode()


def test_same_vocabulary_with_other_padding_maps_every_id_to_itself() -> None:
    tokens = TokenMap.between(Words(["a", "b", "c"]), 6, Words(["a", "b", "c"]), 4)
    assert tokens.is_identity
    assert tokens.token_ids_C.tolist() == [0, 1, 2]


def test_tokens_are_matched_by_their_bytes_whatever_id_and_space_mark() -> None:
    target = Words(["<s>", "a", "▁b", "c", None, "d"], special=(0,))
    draft = Words(["c", "Ġb", "x", "a", "<s>"], special=(4,))
    tokens = TokenMap.between(target, 6, draft, 5, unknown_id=2)
    assert not tokens.is_identity
    assert tokens.token_ids_C.tolist() == [0, 1, 2, 3]
    assert tokens.draft_ids_C.tolist() == [4, 3, 1, 0]
    assert tokens.to_draft([5, 3, 0]) == [2, 0, 4]


def test_special_token_is_no_match_for_ordinary_text_of_the_same_bytes() -> None:
    tokens = TokenMap.between(Words(["<s>", "a"], special=(0,)), 2, Words(["<s>", "a"]), 2)
    assert tokens.token_ids_C.tolist() == [1]


def test_of_several_ids_with_the_same_bytes_the_same_id_is_taken() -> None:
    tokens = TokenMap.between(Words(["x", "b", " a"]), 3, Words(["Ġa", "b", "▁a"]), 3)
    assert tokens.draft_ids_C.tolist() == [1, 2]


def test_vocabulary_with_less_than_half_of_the_tokens_is_rejected_with_their_number() -> None:
    with pytest.raises(ForeignVocabulary, match="the draft model has 1 of the target's 3 tokens; use a draft model of the same family"):
        TokenMap.between(Words(["a", "b", "c"]), 3, Words(["a", "x", "y", "z"]), 4)
