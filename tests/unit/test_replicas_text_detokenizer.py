"""Text piece by piece equals the tokenizer's own decode of the whole, for every family of decoders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.text.detokenizer import IncrementalDetokenizer
from replicas.text.tokenizer import Tokenizer
from tests.prompts import reading_tasks, tricky_strings
from tests.small_tokenizers import FAMILIES, small_tokenizer


def pieces(tokenizer, ids, cuts, skip_special_tokens=True):
    """Texts of the pushes and of the flush; `cuts` are the sizes of the pushes, the rest comes one by one."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    texts, start = [], 0
    for size in cuts:
        texts.append(detokenizer.push(ids[start : start + size]))
        start += size
    texts.extend(detokenizer.push([token_id]) for token_id in ids[start:])
    return [*texts, detokenizer.flush()]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_ids_joined_pieces_equal_the_whole(family, data):
    tokenizer = small_tokenizer(family)
    # Ids past the end stand for the padding rows of a model.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 5), max_size=10))
    skip = data.draw(st.booleans())
    assert "".join(pieces(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 5), max_size=10))
@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "slow_bytes"])
def test_any_text_joined_pieces_equal_the_whole(family, text, cuts):
    tokenizer = small_tokenizer(family)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_resume_goes_on_where_the_first_stopped(family, data):
    tokenizer = small_tokenizer(family)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    first = IncrementalDetokenizer(tokenizer)
    before = first.push(ids[:cut])
    second = IncrementalDetokenizer(tokenizer, output_ids=ids[:cut])
    assert before + second.push(ids[cut:]) + second.flush() == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=60), cuts=st.lists(st.integers(0, 7), max_size=10), skip=st.booleans())
def test_default_model_random_ids_equal_transformers_decode(default_tokenizer, ids, cuts, skip):
    expected = default_tokenizer._hf.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(default_tokenizer, ids, cuts, skip)) == expected


def test_default_model_tricky_strings_equal_transformers_decode(default_tokenizer):
    """Not the text itself: this vocabulary has no tokens for some control characters."""
    for text in tricky_strings():
        ids = default_tokenizer.encode(text)
        expected = default_tokenizer._hf.decode(ids, skip_special_tokens=True)
        assert "".join(pieces(default_tokenizer, ids, [3])) == expected


@pytest.mark.parametrize("language", ["zh", "ru", "ja", "ko", "el"])
def test_default_model_texts_of_other_scripts_show_no_replacement_character(default_tokenizer, language):
    tasks = reading_tasks(language)
    assert len(tasks) >= 2
    for context, questions in tasks:
        assert_whole_without_replacement(default_tokenizer, "\n".join((context, *questions)))


@pytest.mark.parametrize(
    "text",
    [
        # Article 1 of the Universal Declaration of Human Rights.
        "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
        "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
        "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
        "e\u0301 👩‍👩‍👧‍👦 🏳️‍🌈 \u200f\u202e",
    ],
    ids=["ar", "hi", "th", "combined"],
)
@pytest.mark.parametrize("family", ["default", "byte_level", "byte_fallback"])
def test_other_scripts_show_no_replacement_character(default_tokenizer, family, text):
    tokenizer = default_tokenizer if family == "default" else small_tokenizer(family)
    assert_whole_without_replacement(tokenizer, text)


def assert_whole_without_replacement(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = pieces(tokenizer, ids, [])
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_byte_level_unfinished_character_is_held_back():
    tokenizer = small_tokenizer("byte_level")
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    assert pieces(tokenizer, ids, [])[:-1] == [""] * (len(ids) - 1) + ["🙂"]


def test_byte_level_unfinished_character_is_flushed_as_one_replacement():
    tokenizer = small_tokenizer("byte_level")
    ids = tokenizer.encode("a🙂", add_special_tokens=False)
    assert pieces(tokenizer, ids[:-1], [100]) == ["a", "\ufffd"]


def test_byte_fallback_character_is_shown_once_its_run_ends():
    tokenizer = small_tokenizer("byte_fallback")
    ids = tokenizer.encode("aü", add_special_tokens=False) + tokenizer.encode("b", add_special_tokens=False)
    assert pieces(tokenizer, ids, []) == ["a", "", "", "üb", ""]


def test_metaspace_first_space_is_dropped_and_the_others_kept():
    tokenizer = small_tokenizer("metaspace")
    the = tokenizer.encode("the", add_special_tokens=False)
    assert pieces(tokenizer, the * 3, []) == ["the", " the", " the", ""]


def test_wordpiece_pieces_join_without_space():
    tokenizer = small_tokenizer("wordpiece")
    assert pieces(tokenizer, tokenizer.encode("the cats.", add_special_tokens=False), []) == ["the", " cat", "s", ".", ""]


def test_skipped_special_token_does_not_change_what_follows():
    """A window that began with a skipped token would drop the space of the next one."""
    tokenizer = small_tokenizer("metaspace")
    the = tokenizer.encode("the", add_special_tokens=False)
    special = sorted(tokenizer.special_token_ids)
    assert "".join(pieces(tokenizer, the + special + the + special + special + the, [])) == "the the the"


@pytest.mark.parametrize("family", FAMILIES)
def test_cost_of_a_token_does_not_grow_with_the_output(family, monkeypatch):
    """Counts the ids handed to decode, one token of text and one run of bytes at a time."""
    tokenizer = small_tokenizer(family)
    text_id = tokenizer.encode("a", add_special_tokens=False)[-1]
    decoded = []
    original = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, **kw: decoded.append(len(ids)) or original(self, ids, **kw))
    detokenizer = IncrementalDetokenizer(tokenizer)
    for _ in range(500):
        detokenizer.push([text_id])
    detokenizer.flush()
    assert sum(decoded) <= 4 * 500


def test_cost_of_endless_broken_bytes_is_bounded(monkeypatch):
    for family in ("byte_level", "byte_fallback", "slow_bytes"):
        tokenizer = small_tokenizer(family)
        names = {"byte_level": "ä", "byte_fallback": "<0xE4>", "slow_bytes": "ä"}  # U+00E4 is byte E4 in both alphabets
        broken = next(token_id for token_id in range(tokenizer.vocab_size) if tokenizer.token(token_id) == names[family])
        decoded = []
        original = Tokenizer.decode
        monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, d=decoded, o=original, **kw: d.append(len(ids)) or o(self, ids, **kw))
        detokenizer = IncrementalDetokenizer(tokenizer)
        for _ in range(500):
            detokenizer.push([broken])
        detokenizer.flush()
        assert sum(decoded) <= 40 * 500
        monkeypatch.undo()
