"""Stop strings: the first to end wins, nothing leaks, nothing is lost, and time is linear."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.text.stop_strings import StopStringMatcher


def run(stop, chunks, include=False):
    """Text out (flush included when nothing matched), and the match."""
    matcher = StopStringMatcher(stop, include)
    shown = []
    for chunk in chunks:
        text, match = matcher.push(chunk)
        shown.append(text)
        if match is not None:
            return "".join(shown), match
    return "".join(shown) + matcher.flush(), None


def naive(stop, text, include=False):
    """By definition, over the whole text: the smallest end, then the longest string."""
    ends = [(text.find(string) + len(string), -len(string), string) for string in stop if string in text]
    if not ends:
        return text, None
    end, _, string = min(ends)
    return text[: end if include else end - len(string)], string


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=5),
    chunks=st.lists(st.text("abc", max_size=5), max_size=8),
    include=st.booleans(),
)
def test_any_chunking_equals_a_search_of_the_whole(stop, chunks, include):
    assert run(stop, chunks, include) == naive(stop, "".join(chunks), include)


@given(stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5), text=st.text("abc", max_size=20))
def test_held_text_is_the_longest_suffix_that_is_a_proper_prefix(stop, text):
    matcher = StopStringMatcher(stop)
    seen = shown = ""
    for char in text:
        seen += char
        out, match = matcher.push(char)
        shown += out
        if match is not None:
            return
        longest = max((n for n in range(len(seen) + 1) for s in stop if n < len(s) and s.startswith(seen[len(seen) - n :])), default=0)
        assert shown == seen[: len(seen) - longest]


def test_no_stop_strings_hold_nothing():
    assert StopStringMatcher(()).push("abc") == ("abc", None)


def test_prefix_that_cannot_match_is_shown_at_once():
    matcher = StopStringMatcher(("STOP",))
    assert matcher.push("one ST") == ("one ", None)
    assert matcher.push("ART") == ("START", None)


def test_inner_stop_string_ends_before_the_outer_one():
    assert run(["abcd", "bc"], list("xabcd")) == ("xa", "bc")


def test_two_that_end_together_take_the_longest():
    assert run(["c", "abc", "bc"], ["xabc"]) == ("x", "abc")


def test_flush_gives_back_what_never_became_a_stop():
    assert run(["</end>"], ["text </en"]) == ("text </en", None)


def test_stop_string_of_several_scripts_across_chunks():
    assert run(["終わり🙂"], ["話は終", "わり", "🙂もう"]) == ("話は", "終わり🙂")


def test_ignored_match_is_text_and_a_later_one_counts():
    matcher = StopStringMatcher(("ab",))
    assert matcher.push("xab", ignore_matches=True) == ("xab", None)
    assert matcher.push("a", ignore_matches=True) == ("", None)
    assert matcher.push("b") == ("", "ab")


@pytest.mark.parametrize("include", [False, True])
def test_hundreds_of_stop_strings_over_repetitive_text_take_linear_steps(include, monkeypatch):
    """Counts automaton steps: a naive search would take (stops x length) per token."""
    stop = [("a" * length) + "b" for length in range(1, 400)]
    matcher = StopStringMatcher(stop, include)
    calls = 0
    original = StopStringMatcher._step

    def counted(self, node, char):
        nonlocal calls
        calls += 1
        return original(self, node, char)

    monkeypatch.setattr(StopStringMatcher, "_step", counted)
    shown = "".join(matcher.push("a")[0] for _ in range(5000))
    assert calls == 5000
    assert shown == "a" * (5000 - 399)
    text, match = matcher.push("b")
    assert match == "a" * 399 + "b"
    assert text == (match if include else "")
