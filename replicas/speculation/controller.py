"""Decides how many tokens each request drafts in a step. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.scheduling.request_state import RequestState
from replicas.speculation.acceptance import Acceptance, Kind, OwnAcceptance
from replicas.speculation.step_cost import StepCost
from replicas.stats import smoothed

PROBE_TOKENS = 32
"""A request without drafts for so many tokens is tried again with one, so that a change of its text is noticed."""
PROBE_SHARE = 0.003
"""Most of the time of all steps that goes to such trials."""
LOOK_SHARE = 0.003
"""Most of a step's time that goes to looking for drafts of requests that had no use for the last ones."""
LIMITS_OF_RATIO = (0.7, 1.6)
"""Bounds of how much slower or faster than predicted steps with drafts are taken to be, beside steps without."""


class Outlook:
    """What the controller knows of one request."""

    __slots__ = ("acceptance", "drafted_at", "is_productive", "looked_at_step")

    def __init__(self, num_tokens: int) -> None:
        self.acceptance = OwnAcceptance()
        self.drafted_at = num_tokens  # number of the request's tokens when it last had drafts
        self.is_productive = False  # whether the last look for a draft gave one that was worth its time
        self.looked_at_step = 0  # never


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A draft that a request may get."""

    kind: Kind
    survival: Sequence[float]
    """Of each draft, the chance that it and all before it are accepted."""
    num_context_tokens: int
    """Tokens that each draft attends to."""


class Controller:
    """Owns the cost of steps, the measured acceptance, and the time that trials may take.

    It chooses the drafts that make a step's expected tokens per second largest. A prompt token counts as much as a generated one, so
    prompts are not slowed down for drafts. With no drafts worth their time, trials take PROBE_SHARE of all steps and looking for drafts
    LOOK_SHARE, whatever the batch.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.acceptance = Acceptance()
        self.predicted_gain: float | None = None  # tokens per second over those without drafts, smoothed
        self._purse_s = 0.0  # for trials
        self._look_s: float | None = None  # seconds of one look
        self._plain_ratio: float | None = None  # measured over predicted seconds of steps without drafts
        self._drafted_ratio: float | None = None
        self._draft_s: dict[int, float] = {}  # requests, rounded up to a power of two -> seconds of a model for one draft of each
        self.step = 0
        """Number of the current step."""

    def begin_step(self, num_rows: int) -> None:
        """A step of `num_rows` rows without drafts is planned."""
        self.step += 1
        step_s = self.cost.seconds(num_rows)
        self._purse_s = min(self._purse_s + PROBE_SHARE * step_s, step_s)

    def worth_a_look(self, requests: Sequence[tuple[RequestState, Outlook]], num_rows: int, names: Sequence[str]) -> list[int]:
        """Indices of the requests that are asked for drafts in this step by the proposers `names`."""
        step_s = self.cost.seconds(num_rows)
        least_rate = num_rows * (self._drafted_s(num_rows + 1) - step_s) / step_s  # from which a single draft raises tokens per second
        is_hopeful = any(self.acceptance.best_rate(name) > least_rate for name in names)
        asked: list[int] = []
        idle: list[int] = []
        for index, (state, outlook) in enumerate(requests):
            if outlook.is_productive or (is_hopeful and outlook.looked_at_step == 0):
                asked.append(index)
            elif is_hopeful or self._is_probe_due(state, outlook):
                idle.append(index)
        num_looks = max(1, int(LOOK_SHARE * step_s / self._look_s)) if self._look_s else len(idle)
        idle.sort(key=lambda index: requests[index][1].looked_at_step)
        asked += idle[:num_looks]
        for index in asked:
            requests[index][1].looked_at_step = self.step
        return sorted(asked)

    def note_looks(self, num_looks: int, seconds: float) -> None:
        if num_looks:
            self._look_s = smoothed(self._look_s, seconds / num_looks)

    def survival(self, outlook: Outlook, kind: Kind, num_drafts: int) -> Sequence[float]:
        return self.acceptance.survival(outlook.acceptance, kind, num_drafts)

    def choose(self, num_rows: int, offers: Sequence[Offer], budget: int) -> list[int]:
        """How many drafts of each offer to verify beside `num_rows` other rows, at most `budget` in all."""
        chances = sorted(
            ((chance, index) for index, offer in enumerate(offers) for chance in offer.survival), key=lambda item: item[0], reverse=True
        )
        plain = best = num_rows / self.cost.seconds(num_rows)
        expected, context_s, num_best = float(num_rows), 0.0, 0
        for num_drafts, (chance, index) in enumerate(chances[:budget], start=1):
            expected += chance
            context_s += self.cost.context_s * offers[index].num_context_tokens
            rate = expected / (self._drafted_s(num_rows + num_drafts) + context_s)
            if rate > best:
                best, num_best = rate, num_drafts
        self.predicted_gain = smoothed(self.predicted_gain, best / plain)
        lengths = [0] * len(offers)
        for _, index in chances[:num_best]:
            lengths[index] += 1
        return lengths

    def try_probe(self, state: RequestState, outlook: Outlook, num_rows: int) -> bool:
        """Whether a request without a worthwhile draft gets one all the same; pays for it."""
        if not self._is_probe_due(state, outlook):
            return False
        price_s = self.cost.seconds(num_rows + 1) - self.cost.seconds(num_rows)
        if price_s > self._purse_s:
            return False
        self._purse_s -= price_s
        return True

    def drafts_of_model(self, num_rows: int, offers: Sequence[Offer]) -> int:
        """How many drafts of each request a model makes, one pass for each: `offers` hold the expected chances of their largest number.
        0 if it is not worth its time."""
        most = max((len(offer.survival) for offer in offers), default=0)
        best, num_best = num_rows / self.cost.seconds(num_rows), 0
        pass_s = self._draft_s.get(_bucket(len(offers)), 0.0)
        for num_drafts in range(1, most + 1):
            expected = num_rows + sum(sum(offer.survival[:num_drafts]) for offer in offers)
            drafts = sum(min(num_drafts, len(offer.survival)) for offer in offers)
            context_s = sum(min(num_drafts, len(offer.survival)) * offer.num_context_tokens for offer in offers) * self.cost.context_s
            rate = expected / (self._drafted_s(num_rows + drafts) + context_s + num_drafts * pass_s)
            if rate > best:
                best, num_best = rate, num_drafts
        return num_best

    def try_probe_of_model(self, requests: Sequence[tuple[RequestState, Outlook]], num_rows: int) -> list[int]:
        """Indices of the requests for which a model makes one draft although it is not worth its time; pays for it."""
        due = [index for index, (state, outlook) in enumerate(requests) if self._is_probe_due(state, outlook)]
        for num in range(len(due), 0, -1):
            price_s = self.cost.seconds(num_rows + num) - self.cost.seconds(num_rows) + self._draft_s.get(_bucket(num), 0.0)
            if price_s <= self._purse_s:
                self._purse_s -= price_s
                return due[:num]
        return []

    def note_model(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """A model took `seconds` for `num_drafts` passes over `num_requests` requests."""
        bucket = _bucket(num_requests)
        self._draft_s[bucket] = smoothed(self._draft_s.get(bucket), seconds / num_drafts)

    def note_step(self, num_rows: int, num_drafts: int, num_context_tokens: int, seconds: float) -> None:
        """A step without prompts took `seconds`; `num_context_tokens` is the sum over its drafts."""
        predicted_s = self.cost.seconds(num_rows + num_drafts) + self.cost.context_s * num_context_tokens
        if num_drafts:
            self._drafted_ratio = smoothed(self._drafted_ratio, seconds / predicted_s)
        else:
            self._plain_ratio = smoothed(self._plain_ratio, seconds / predicted_s)

    def note_verified(self, outlook: Outlook, kind: Kind, num_drafts: int, num_accepted: int) -> None:
        self.acceptance.note(outlook.acceptance, kind, num_drafts, num_accepted)

    def _drafted_s(self, num_rows: int) -> float:
        """Predicted seconds with drafts among the rows, on the scale of steps without."""
        ratio = 1.0
        if self._plain_ratio and self._drafted_ratio:
            ratio = min(max(self._drafted_ratio / self._plain_ratio, LIMITS_OF_RATIO[0]), LIMITS_OF_RATIO[1])
        return ratio * self.cost.seconds(num_rows)

    @staticmethod
    def _is_probe_due(state: RequestState, outlook: Outlook) -> bool:
        return len(state.token_ids) - outlook.drafted_at >= PROBE_TOKENS


def _bucket(num_requests: int) -> int:
    return 1 << max(0, num_requests - 1).bit_length()
