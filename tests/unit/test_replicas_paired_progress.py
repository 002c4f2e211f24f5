"""Two streams as one, against the plain rule: every token once, in order, with its own log-probability, and one ending."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.handoff.paired_progress import PairedProgress
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, TokenLogprob
from replicas.sampling_params import SamplingParams
from tests.unit.pair_backend import HANDOFF, logprob

KEY = RequestKey("a", 0)
OFFER = RequestProgress(key=KEY, attempt=0, handoff=HANDOFF)
PREFILL_CACHED, DECODE_CACHED = 8, 4


def merge_for(*, logprobs: bool = False) -> PairedProgress:
    params = SamplingParams(max_tokens=10, logprobs=0 if logprobs else None)
    return PairedProgress(GenerationRequest(request_id="a", prompt_ids=(1, 2), params=params, seed=0))


def said(*token_ids: int, end: FinishReason | None = None, logprobs: tuple[TokenLogprob, ...] = (), cached: int = 0) -> RequestProgress:
    return RequestProgress(key=KEY, attempt=0, token_ids=token_ids, finish_reason=end, logprobs=logprobs, num_cached_tokens=cached)


@dataclass
class Told:
    """What came out of a merge."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)

    def add(self, item: RequestProgress | None) -> None:
        if item is None:
            return
        assert not self.ends, "something was told after the end"
        assert item.handoff is None
        assert item.token_ids or item.finish_reason is not None, "nothing was told"
        self.token_ids += item.token_ids
        self.logprobs += item.logprobs
        if item.finish_reason is not None:
            self.ends.append(item.finish_reason)


@dataclass(frozen=True)
class Course:
    """What both sides say, and in which order it arrives."""

    num_tokens: int
    is_prefill_lost: bool
    is_handed: bool
    """The decode side has its first token from the handoff, without a log-probability; else it computed it."""
    first_decoded: int
    """The decode side's own first token; 0 is the one of the prefill side."""
    cuts: frozenset[int]
    order: tuple[bool, ...]
    """Whose message is next: the prefill side's when true; a side that has no more leaves it to the other."""
    wants_logprobs: bool

    @property
    def decoded(self) -> list[int]:
        return [self.first_decoded, *range(1, self.num_tokens)]

    def prefill_messages(self) -> list[RequestProgress | None]:
        if self.is_prefill_lost:
            return [OFFER, None]
        end = FinishReason.LENGTH if self.num_tokens == 1 else FinishReason.HANDOFF
        return [OFFER, said(0, end=end, logprobs=(logprob(0),) if self.wants_logprobs else (), cached=PREFILL_CACHED)]

    def decode_messages(self) -> list[RequestProgress]:
        bounds = [0, *sorted(cut for cut in self.cuts if 0 < cut < self.num_tokens), self.num_tokens]
        messages = []
        for start, stop in pairwise(bounds):
            token_ids = self.decoded[start:stop]
            bare = 1 if self.is_handed and start == 0 else 0
            logprobs = tuple(map(logprob, token_ids[bare:])) if self.wants_logprobs else ()
            end = FinishReason.LENGTH if stop == self.num_tokens else None
            messages.append(said(*token_ids, end=end, logprobs=logprobs, cached=DECODE_CACHED))
        return messages


COURSES = st.builds(
    Course,
    num_tokens=st.integers(1, 6),
    is_prefill_lost=st.booleans(),
    is_handed=st.booleans(),
    first_decoded=st.sampled_from([0, 0, 77]),
    cuts=st.frozensets(st.integers(1, 5)),
    order=st.lists(st.booleans(), max_size=12).map(tuple),
    wants_logprobs=st.booleans(),
)


def run(course: Course) -> tuple[PairedProgress, Told, bool]:
    """Also returns whether the prefill side's token was there before any token of the decode side was told."""
    merge, told, is_prefill_first = merge_for(logprobs=course.wants_logprobs), Told(), False
    prefill, decode = course.prefill_messages(), course.decode_messages()
    order = [*course.order, *[True] * 8, *[False] * 8]
    while order and (prefill or decode) and not told.ends and merge.resend_reason is None:
        if (order.pop(0) and prefill) or not decode:
            item = prefill.pop(0)
            is_prefill_first |= item is not None and bool(item.token_ids) and not told.token_ids
            if item is None:
                merge.lose_prefill()
            else:
                told.add(merge.take_prefill(item))
        else:
            told.add(merge.take_decode(decode.pop(0)))
    return merge, told, is_prefill_first


@settings(max_examples=500, deadline=None)
@given(COURSES)
def test_any_order_of_both_sides_is_one_stream(course: Course) -> None:
    merge, told, is_prefill_first = run(course)
    first = 0 if is_prefill_first else course.first_decoded
    whole = [first, *range(1, course.num_tokens)]
    if course.wants_logprobs:
        assert told.logprobs == [logprob(token_id) for token_id in told.token_ids]
    if merge.resend_reason is None:
        assert told.token_ids == whole
        assert told.ends == [FinishReason.LENGTH]
        return
    assert told.token_ids == whole[: len(told.token_ids)]
    assert list(merge.first_ids) == told.token_ids
    assert not told.ends
    if merge.resend_reason == "first_token_differs":
        assert is_prefill_first
        assert course.first_decoded != 0
    else:
        assert course.is_prefill_lost
        assert course.is_handed
        assert course.wants_logprobs


def test_first_token_comes_from_the_prefill_side_with_its_cached_tokens_and_the_rest_from_the_other() -> None:
    merge = merge_for()
    assert merge.take_prefill(OFFER) is None
    first = merge.take_prefill(said(5, end=FinishReason.HANDOFF, cached=PREFILL_CACHED))
    assert first == said(5, cached=PREFILL_CACHED)
    assert merge.take_decode(said(5, cached=DECODE_CACHED)) is None
    assert merge.take_decode(said(6, cached=DECODE_CACHED)) == said(6, cached=PREFILL_CACHED)


def test_decode_side_that_is_first_is_believed_to_the_end() -> None:
    merge = merge_for()
    assert merge.take_decode(said(7)) == said(7)
    assert merge.take_prefill(said(5, end=FinishReason.STOP)) is None, "its answer is another one"
    assert merge.take_decode(said(8, end=FinishReason.LENGTH)) == said(8, end=FinishReason.LENGTH)
    assert merge.resend_reason is None


def test_cached_tokens_are_those_of_the_decode_side_once_the_other_is_lost() -> None:
    merge = merge_for()
    merge.take_prefill(OFFER)
    merge.lose_prefill()
    assert merge.take_decode(said(7, cached=DECODE_CACHED)) == said(7, cached=DECODE_CACHED)


def test_token_ahead_of_its_logprob_waits_for_the_side_that_has_it() -> None:
    merge = merge_for(logprobs=True)
    assert merge.take_decode(said(5)) is None
    assert merge.take_decode(said(6, logprobs=(logprob(6),), end=FinishReason.STOP)) is None
    assert merge.has_decoded
    told = merge.take_prefill(said(5, end=FinishReason.HANDOFF, logprobs=(logprob(5),)))
    assert told is not None
    assert (told.token_ids, told.logprobs, told.finish_reason) == ((5, 6), (logprob(5), logprob(6)), FinishReason.STOP)


def test_tokens_held_back_that_differ_are_told_as_the_prefill_side_has_them_and_asked_for_anew() -> None:
    merge = merge_for(logprobs=True)
    merge.take_decode(said(9))
    assert merge.take_prefill(said(5, end=FinishReason.HANDOFF, logprobs=(logprob(5),))) == said(5, logprobs=(logprob(5),))
    assert merge.resend_reason == "first_token_differs"
    assert merge.first_ids == (5,)


def test_bad_ending_of_the_decode_side_is_told_without_what_was_held_back() -> None:
    merge = merge_for(logprobs=True)
    merge.take_decode(said(5))
    assert merge.take_decode(said(end=FinishReason.CANCELLED)) == said(end=FinishReason.CANCELLED)
