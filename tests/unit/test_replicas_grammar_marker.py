"""A grammar behind a marker. Where a marker ends is judged by `bytes.find`; token boundaries are made up by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from replicas.grammar.begin_marker import BeginMarker
from replicas.grammar.llguidance_compiler import LLGuidanceCompiler
from replicas.grammar.token_rows import TokenRows
from replicas.grammar_spec import GrammarKind, GrammarSpec
from tests.grammar_masks import EOS, allowed_tokens, default_backend, default_compiler, token_ids

YES = GrammarSpec(kind=GrammarKind.CHOICE, text='["yes", "no"]', begins_after="</think>")
PIECES = [b"a", b"b", b"ab", b"aba", b"bab", b"c", b"abac", b"cab", b"", b"abab"]
EOS_PIECE = 8


@pytest.fixture(scope="module")
def compiler(default_model_dir: Path) -> LLGuidanceCompiler:
    return default_compiler(default_model_dir)


def ids_of(default_model_dir: Path, text: str) -> list[int]:
    return token_ids(default_backend(default_model_dir), text)


@pytest.mark.parametrize("text", ["a", "ab", "abab", "abac", "aab"])
@pytest.mark.parametrize("seed", range(6))
def test_marker_ends_where_find_says_and_no_token_goes_beyond_it(text: str, seed: int) -> None:
    tokens = TokenRows(PIECES, 40, frozenset([EOS_PIECE]))
    marker = BeginMarker(text, tokens)
    draw = random.Random(seed)
    for _ in range(30):
        state, so_far = 0, b""
        while state < marker.size and len(so_far) < 40:
            for token_id, raw in enumerate(PIECES):
                end = (so_far + raw).find(text.encode())
                goes_beyond = end >= 0 and end + len(text) < len(so_far + raw)
                is_allowed = bool(marker.row(state)[token_id // 32] >> token_id % 32 & 1)
                assert is_allowed == (raw != b"" and not goes_beyond)
                assert (marker.next_state(state, token_id) is not None) == is_allowed
            token_id = draw.choice([token_id for token_id in range(len(PIECES)) if marker.next_state(state, token_id) is not None])
            so_far += PIECES[token_id]
            following = marker.next_state(state, token_id)
            assert following is not None
            state = following
            assert (state == marker.size) == (text.encode() in so_far)


def test_rows_without_a_token_and_ids_beyond_them_are_not_allowed() -> None:
    marker = BeginMarker("ab", TokenRows(PIECES, 40, frozenset([EOS_PIECE])))
    assert marker.next_state(0, 39) is None
    assert marker.next_state(0, EOS_PIECE) is None
    assert not marker.row(0)[1] & (1 << 7)


def test_text_is_free_until_the_marker_and_cannot_end_before_it(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    matcher = compiler.matcher(YES)
    free = allowed_tokens(matcher)
    assert EOS not in free
    assert len(free) > 48_000
    thought = ids_of(default_model_dir, "<think>\nHm, no, </thin, yes?\n</think>")
    for token_id in thought:
        assert token_id in allowed_tokens(matcher)
        assert (matcher.may_end, matcher.must_end, matcher.forced_tokens()) == (False, False, [])
        assert matcher.accept(token_id)
    alone = compiler.matcher(GrammarSpec(kind=GrammarKind.CHOICE, text=YES.text))
    assert allowed_tokens(matcher) == allowed_tokens(alone)
    assert matcher.accept_all([*ids_of(default_model_dir, "no"), EOS]) == 2
    assert matcher.must_end
    assert matcher.num_tokens == len(thought) + 2


def test_rollback_goes_through_the_marker_and_back_again(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    ids = [*ids_of(default_model_dir, "so </think>"), *ids_of(default_model_dir, "yes"), EOS]
    matcher = compiler.matcher(YES)
    masks = []
    for token_id in ids:
        masks.append((allowed_tokens(matcher), matcher.may_end))
        assert matcher.accept(token_id)
    for num_back in range(1, len(ids) + 1):
        matcher.rollback(num_back)
        place = len(ids) - num_back
        assert matcher.num_tokens == place
        assert (allowed_tokens(matcher), matcher.may_end) == masks[place]
        assert matcher.accept_all(ids[place:]) == num_back
    with pytest.raises(ValueError, match=f"from 0 to {len(ids)}"):
        matcher.rollback(len(ids) + 1)


def test_eos_within_the_thought_is_an_error_and_drafts_of_it_are_none(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    matcher = compiler.matcher(YES)
    ids = ids_of(default_model_dir, "well")
    assert matcher.accept_all([*ids, EOS, *ids]) == len(ids)
    assert matcher.error is None
    assert not matcher.accept(EOS)
    assert matcher.error is not None
    assert (matcher.accept(ids[0]), matcher.may_end) == (False, False)


def test_name_of_a_special_token_can_be_the_marker(compiler: LLGuidanceCompiler, default_model_dir: Path) -> None:
    spec = GrammarSpec(kind=GrammarKind.CHOICE, text='["yes"]', begins_after="<|im_start|>")
    matcher = compiler.matcher(spec)
    assert matcher.accept_all([*ids_of(default_model_dir, "hm"), 1, *ids_of(default_model_dir, "yes")]) == 3
    assert matcher.must_end
