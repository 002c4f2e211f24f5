"""The emitted tokens of one choice, so that another replica can continue from there."""

from __future__ import annotations

from dataclasses import replace

from replicas.request import GenerationRequest, RequestProgress


class StreamJournal:
    """Owns the emitted token ids of one choice and its attempt number.

    Each emitted token is in the journal exactly once, in order; messages of an older attempt never enter.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._token_ids = list(request.output_ids)
        self._attempt = request.attempt

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self._request.wants_prompt_logprobs

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def current_request(self) -> GenerationRequest:
        """The request as a replica must get it now: the emitted tokens filled in, the attempt raised."""
        return replace(self._request, output_ids=tuple(self._token_ids), attempt=self._attempt)

    def try_record(self, progress: RequestProgress) -> bool:
        """Takes a message of the current attempt; False for one of an older attempt, which must be dropped."""
        if progress.attempt != self._attempt:
            return False
        self._token_ids.extend(progress.token_ids)
        return True

    def begin_attempt(self) -> GenerationRequest:
        """Raises the attempt after a death and gives the request to resend."""
        self._attempt += 1
        return self.current_request()
