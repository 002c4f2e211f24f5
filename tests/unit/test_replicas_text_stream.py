"""What the client reads: text up to the stop, the tokens that count, and why it ended."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.model.default_model import prepare_default_model
from replicas.request import FinishReason, RequestKey, RequestProgress, TokenLogprob
from replicas.sampling_params import SamplingParams
from replicas.text.text_stream import TextStream
from replicas.text.tokenizer import Tokenizer
from tests.small_tokenizers import small_tokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(prepare_default_model())


def progress(ids=(), finish=None, stop_token=None, with_logprobs=False):
    logprobs = tuple(TokenLogprob(token_id, -0.5, ()) for token_id in ids) if with_logprobs else ()
    return RequestProgress(
        key=RequestKey("r", 0), attempt=0, token_ids=tuple(ids), logprobs=logprobs, finish_reason=finish, stop_token_id=stop_token
    )


def read(stream, ids, sizes=(), finish=FinishReason.LENGTH, stop_token=None):
    """Pushes `ids` in the given sizes, the rest with the finish; the joined text, ids and the last delta."""
    text, seen, start = "", (), 0
    for size in sizes:
        delta = stream.push(progress(ids[start : start + size]))
        start += size
        text, seen = text + delta.text, seen + delta.token_ids
        if delta.finish_reason is not None:
            return text, seen, delta
    delta = stream.push(progress(ids[start:], finish, stop_token))
    return text + delta.text, seen + delta.token_ids, delta


def test_length_end_gives_all_text(tokenizer):
    ids = tokenizer.encode("Hello wide world")
    text, seen, last = read(TextStream(tokenizer, SamplingParams()), ids, [1, 1])
    assert (text, seen) == ("Hello wide world", tuple(ids))
    assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_eos_counts_but_never_shows(tokenizer, include, skip):
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    ids = [*tokenizer.encode("Hello"), EOS]
    text, seen, last = read(TextStream(tokenizer, params), ids, finish=FinishReason.STOP, stop_token=EOS)
    assert (text, seen) == ("Hello", tuple(ids))
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_shows_only_when_asked_for(tokenizer, include):
    ids = tokenizer.encode("Hello world")
    params = SamplingParams(stop_token_ids=(ids[-1],), include_stop_str_in_output=include)
    text, seen, last = read(TextStream(tokenizer, params), ids, [1], FinishReason.STOP, ids[-1])
    assert text == ("Hello world" if include else tokenizer.decode(ids[:-1]))
    assert seen == tuple(ids)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, ids[-1])


def test_stop_string_ends_the_text_and_drops_later_tokens(tokenizer):
    ids = tokenizer.encode("one two three four")
    stream = TextStream(tokenizer, SamplingParams(stop=("two",), logprobs=0))
    delta = stream.push(progress(ids, with_logprobs=True))
    used = next(n for n in range(len(ids) + 1) if "two" in tokenizer.decode(ids[:n]))
    assert delta.text == "one "
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "two")
    assert delta.token_ids == tuple(ids[:used])
    assert len(delta.logprobs) == used == stream.num_tokens
    assert stream.is_finished
    assert stream.push(progress((), FinishReason.CANCELLED)).finish_reason is None


def test_stop_string_included_on_request(tokenizer):
    params = SamplingParams(stop=("two",), include_stop_str_in_output=True)
    assert read(TextStream(tokenizer, params), tokenizer.encode("one two three"))[0] == "one two"


def test_stop_string_split_over_tokens_never_leaks(tokenizer):
    ids = [token_id for word in ("one", " t", "w", "o", " three") for token_id in tokenizer.encode(word)]
    text, _, last = read(TextStream(tokenizer, SamplingParams(stop=("two",))), ids, [1] * len(ids))
    assert (text, last.stop_reason) == ("one ", "two")


def test_beginning_of_a_stop_string_is_not_lost_at_the_end(tokenizer):
    for stop_token, finish in ((EOS, FinishReason.STOP), (None, FinishReason.LENGTH), (None, FinishReason.CANCELLED)):
        ids = tokenizer.encode("one tw") + ([EOS] if stop_token else [])
        assert read(TextStream(tokenizer, SamplingParams(stop=("two",))), ids, [1], finish, stop_token)[0] == "one tw"


def test_stop_string_before_min_tokens_is_text(tokenizer):
    ids = [token_id for word in ("a", " stop", " b", " stop") for token_id in tokenizer.encode(word)]
    assert len(ids) == 4
    text, seen, _ = read(TextStream(tokenizer, SamplingParams(stop=("stop",), min_tokens=3)), ids)
    assert (text, len(seen)) == ("a stop b ", 4)
    assert read(TextStream(tokenizer, SamplingParams(stop=("stop",), min_tokens=2)), ids)[0] == "a "


def test_stop_string_completed_by_the_flush_counts():
    """The replacement character of an unfinished one is text too, when it is what the client waits for."""
    tokenizer = small_tokenizer("byte_level")
    ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    text, _, last = read(TextStream(tokenizer, SamplingParams(stop=("a\ufffd",))), ids)
    assert (text, last.finish_reason, last.stop_reason) == ("", FinishReason.STOP, "a\ufffd")


def test_resume_of_a_stream_already_stopped_is_finished(tokenizer):
    assert TextStream(tokenizer, SamplingParams(stop=("two",)), tokenizer.encode("one two")).is_finished


WORDS = st.sampled_from(["one", " two", "tw", "o", "🙂", "é", " 你好", "\n", "two", "e\u0301", "!"])


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(WORDS, max_size=12),
    stop=st.lists(st.sampled_from(["two", "wo!", "🙂", "好\n", "one one", "\u0301"]), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
    sizes=st.lists(st.integers(0, 4), max_size=8),
    cut=st.integers(0, 12),
)
def test_any_split_and_any_resume_give_the_same_text(tokenizer, words, stop, include, min_tokens, sizes, cut):
    params = SamplingParams(stop=tuple(stop), include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None)
    ids = [token_id for word in words for token_id in tokenizer.encode(word)]
    whole = read(TextStream(tokenizer, params), ids)
    split = read(TextStream(tokenizer, params), ids, sizes)
    assert (split[:2], split[2].finish_reason, split[2].stop_reason) == (whole[:2], whole[2].finish_reason, whole[2].stop_reason)
    if not stop:
        assert whole[0] == tokenizer.decode(ids)

    first = TextStream(tokenizer, params)
    before = first.push(progress(ids[:cut]))
    second = TextStream(tokenizer, params, ids[:cut])
    assert (second.is_finished, second.num_tokens, second.num_chars) == (first.is_finished, first.num_tokens, first.num_chars)
    if not first.is_finished:
        text, seen, _ = read(second, ids[cut:])
        assert (before.text + text, before.token_ids + seen) == whole[:2]


@pytest.mark.parametrize("family", ["byte_fallback", "metaspace", "wordpiece"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_other_families_without_stops_equal_decode(family, data):
    tokenizer = small_tokenizer(family)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=8))
    assert read(TextStream(tokenizer, SamplingParams()), ids, sizes)[0] == tokenizer.decode(ids)
