"""The emitted tokens of one choice, from which another replica can continue."""

from __future__ import annotations

from dataclasses import replace

from replicas.request import GenerationRequest, RequestProgress


class StreamJournal:
    """Owns the emitted token ids of one choice and its attempt number.

    Each emitted token is in the journal exactly once, in order; messages of an older attempt are never recorded.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._token_ids = list(request.output_ids)
        self._attempt = request.attempt

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def current_request(self) -> GenerationRequest:
        """The request to send to a replica now, with the emitted tokens and the current attempt."""
        return replace(self._request, output_ids=tuple(self._token_ids), attempt=self._attempt)

    def try_record(self, progress: RequestProgress) -> bool:
        """Records a message of the current attempt; False for a message of an older attempt, which must be dropped."""
        if progress.attempt != self._attempt:
            return False
        self._token_ids.extend(progress.token_ids)
        return True

    def begin_attempt(self) -> GenerationRequest:
        """Raises the attempt after a loss and returns the request to resend."""
        self._attempt += 1
        return self.current_request()
