"""A request's tokens as its client reads them: text up to the stop, and the finish reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.request import FinishReason, RequestProgress, TokenLogprob
from replicas.sampling_params import SamplingParams
from replicas.text.detokenizer import IncrementalDetokenizer
from replicas.text.stop_strings import StopStringMatcher
from replicas.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The text and tokens that one progress adds. The last delta of a stream, and only it, has a `finish_reason`."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Tokens up to and including the one that completed a stop string; later ones are dropped."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id in `stop_token_ids`, that ended the text; None for EOS and every other end."""


class TextStream:
    """Detokenizer and stop strings of one request, fed with the engine's progress.

    The text returned is a function of the tokens pushed, so a new stream over `output_ids` is in exactly the state of an
    earlier one over the same tokens. `num_tokens` and `num_chars` count all tokens and text, replayed ones included.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, output_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStringMatcher(params.stop, params.include_stop_str_in_output)
        self._match: str | None = None  # the stop string that ended the text
        self.is_finished = False
        """After a delta with a finish reason, or when `output_ids` already held a stop string."""
        self.num_tokens = 0
        text, _ = self._add(output_ids)
        self.num_chars = len(text)
        self.is_finished = self._match is not None

    def push(self, progress: RequestProgress) -> TextDelta:
        """The delta of one progress. On a stop string its `finish_reason` is STOP while the engine still runs the request: the
        caller must cancel it there, and later progress gives empty deltas."""
        if self.is_finished:
            return TextDelta()
        token_ids = progress.token_ids
        has_hidden_stop = bool(token_ids) and self._is_hidden_stop(progress)
        text, num_used = self._add(token_ids[:-1] if has_hidden_stop else token_ids)
        if self._match is None and has_hidden_stop:
            num_used += 1
            self.num_tokens += 1
        finish_reason = progress.finish_reason
        stop_reason: str | int | None = self._stop_token_reason(progress)
        if finish_reason is not None and self._match is None:
            text += self._end()
        if self._match is not None:
            finish_reason, stop_reason = FinishReason.STOP, self._match
        self.is_finished = finish_reason is not None
        self.num_chars += len(text)
        return TextDelta(
            text=text,
            token_ids=token_ids[:num_used],
            logprobs=progress.logprobs[:num_used],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _add(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """The text that these tokens add, and the number of tokens used: all, or up to the one that completed a stop string.

        Tokens are pushed one by one, so that the result does not depend on how many arrive together.
        """
        texts = []
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            text, self._match = self._stops.push(self._detokenizer.push((token_id,)), self.num_tokens < self._params.min_tokens)
            texts.append(text)
            if self._match is not None:
                return "".join(texts), index + 1
        return "".join(texts), len(token_ids)

    def _end(self) -> str:
        """The text held back, at the end of the output. It may still complete a stop string."""
        text, self._match = self._stops.push(self._detokenizer.flush(), self.num_tokens < self._params.min_tokens)
        return text if self._match is not None else text + self._stops.flush()

    def _is_hidden_stop(self, progress: RequestProgress) -> bool:
        """Whether the last token is a stop token without text: always for EOS, for others unless `include_stop_str_in_output`."""
        if progress.finish_reason is not FinishReason.STOP or progress.stop_token_id is None:
            return False
        is_eos = progress.stop_token_id in self._tokenizer.eos_token_ids or progress.stop_token_id not in self._params.stop_token_ids
        return is_eos or not self._params.include_stop_str_in_output

    def _stop_token_reason(self, progress: RequestProgress) -> int | None:
        is_asked_for = progress.finish_reason is FinishReason.STOP and progress.stop_token_id in self._params.stop_token_ids
        return progress.stop_token_id if is_asked_for else None
