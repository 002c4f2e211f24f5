"""Prefill on one engine and decode on another, as one engine: a gateway's work with two pools, inside one process."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Literal, get_args

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.handoff.paired_progress import BAD_ENDINGS, PairedProgress
from replicas.handoff.wiring import InProcessWiring, RemoteWiring
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected, StepOutput
from replicas.stats import ReplicaStats
from replicas.step_engine import KVChanges

Transfer = Literal["auto", "in-process", "process-group"]


class _Pair:
    """One request in both engines."""

    def __init__(self, request: GenerationRequest, *, has_prefill: bool) -> None:
        self.request = request
        self.merge = PairedProgress(request)
        self.has_prefill = has_prefill
        self.decode_attempt: int | None = None  # attempt number in the decode engine, once sent there
        if not has_prefill:
            self.merge.lose_prefill()


class DisaggregatedEngine:
    """Owns a prefill engine and a decode engine, and steps both on the caller's thread.

    The decode engine begins to pull when the first chunk of a prefill is computed. `PairedProgress` merges both streams into one.
    If a prefill fails, the decode engine computes the whole request.
    """

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        if not (prefill.handoffs.is_open and decode.handoffs.is_open):
            raise ValueError("role must be prefill for the one engine and decode for the other: a unified one hands nothing over")
        self.prefill, self.decode = prefill, decode
        self._pairs: dict[RequestKey, _Pair] = {}
        self._unreported: list[RequestProgress] = []

    @classmethod
    def load(cls, config: EngineConfig, transfer: Transfer = "auto", decode_config: EngineConfig | None = None) -> DisaggregatedEngine:
        """Loads both engines of one model; `decode_config` is the decode engine's if it differs, for example in
        `tensor_parallel_size`.

        Transfer "auto" is in-process if both engines have one rank, else process-group. Raises ValueError naming the setting.
        """
        if transfer not in get_args(Transfer):
            raise ValueError(f"transfer must be one of {', '.join(get_args(Transfer))}, got {transfer!r}")
        decode_config = decode_config or config
        if transfer == "auto":
            transfer = "in-process" if config.tensor_parallel_size == decode_config.tensor_parallel_size == 1 else "process-group"
        changed = threading.Event()
        wiring = InProcessWiring(changed) if transfer == "in-process" else RemoteWiring(changed)
        prefill = load_engine(replace(config, role="prefill"), wiring)
        try:
            return cls(prefill, load_engine(replace(decode_config, role="decode"), wiring))
        except BaseException:
            prefill.close()
            raise

    @property
    def tokenizer_source(self) -> str:
        return self.prefill.tokenizer_source

    @property
    def has_work(self) -> bool:
        return bool(self._pairs or self._unreported) or self.prefill.has_work or self.decode.has_work

    def add_request(self, request: GenerationRequest) -> None:
        """Raises RequestRejected if either engine could never serve it."""
        if request.key in self._pairs:
            raise RequestRejected(f"request {request.request_id!r} choice {request.choice} is already running")
        num_tokens, longest = len(request.prompt_ids), self.decode.description.max_model_len
        if num_tokens + (0 if request.params.max_tokens == 0 else 1) > longest:
            raise RequestRejected(f"the prompt has {num_tokens} tokens; the decode engine's max_model_len is {longest}")
        pair = _Pair(request, has_prefill=not request.wants_prompt_logprobs)
        if pair.has_prefill:
            self.prefill.add_request(replace(request, wants_handoff=True))
        else:  # prompt_logprobs need the logits of every position from one engine
            self.decode.add_request(request)
            pair.decode_attempt = request.attempt
        self._pairs[request.key] = pair

    def cancel(self, key: RequestKey) -> bool:
        pair = self._pairs.pop(key, None)
        if pair is None:
            return False
        self._cancel_engines(key)
        self._unreported.append(RequestProgress(key=key, attempt=pair.request.attempt, finish_reason=FinishReason.CANCELLED))
        return True

    def step(self) -> StepOutput:
        """One step of each engine; waits a little for transfers if neither has anything to compute."""
        outputs = []
        progress, self._unreported = self._unreported, []
        for engine, take in ((self.prefill, self._take_prefill), (self.decode, self._take_decode)):
            output = engine.step(may_wait=False)
            outputs.append(output)
            for item in output.progress:
                pair = self._pairs.get(item.key)
                if pair is not None:
                    progress += take(pair, item)
        is_idle = not progress and not any(o.num_prefill_tokens + o.num_decode_tokens for o in outputs)
        if is_idle and self.has_work:
            self.decode.handoffs.wait()
        return StepOutput(
            progress=tuple(progress),
            num_prefill_tokens=sum(o.num_prefill_tokens for o in outputs),
            num_decode_tokens=sum(o.num_decode_tokens for o in outputs),
            num_drafts=sum(o.num_drafts for o in outputs),
            num_preemptions=sum(o.num_preemptions for o in outputs),
            num_paused=sum(o.num_paused for o in outputs),
            step_s=sum(o.step_s for o in outputs),
        )

    def wake(self) -> None:
        """Ends a step that waits for transfers. Callable from any thread."""
        self.prefill.wake()
        self.decode.wake()

    def stats(self) -> ReplicaStats:
        """Statistics of the decode engine, with the prefill engine's queue and prefill rate."""
        first, second = self.prefill.stats(), self.decode.stats()
        return replace(
            second,
            num_waiting=first.num_waiting + second.num_waiting,
            num_uncomputed_tokens=first.num_uncomputed_tokens + second.num_uncomputed_tokens,
            num_prompt_tokens=first.num_prompt_tokens + second.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens,
            prefill_tokens_per_s=first.prefill_tokens_per_s,
        )

    def kv_changes(self, since: int | None) -> KVChanges:
        """Changes in the prefill engine, where prefixes are looked up."""
        return self.prefill.kv_changes(since)

    def close(self) -> None:
        self._pairs.clear()
        self.decode.close()
        self.prefill.close()

    def _take_prefill(self, pair: _Pair, item: RequestProgress) -> list[RequestProgress]:
        if not pair.has_prefill or item.attempt != pair.request.attempt:
            return []
        told = None
        if item.finish_reason in BAD_ENDINGS:
            pair.has_prefill = False
            pair.merge.lose_prefill()
        else:
            told = pair.merge.take_prefill(item)
        ended = self._report(pair, told)
        if pair.merge.resend_reason is not None:
            return ended + self._resend(pair)
        is_running = item.key in self._pairs
        if is_running and pair.decode_attempt is None and (item.handoff is not None or not pair.has_prefill):
            return ended + self._send_to_decode(pair, replace(pair.request, handoff=item.handoff))
        return ended

    def _take_decode(self, pair: _Pair, item: RequestProgress) -> list[RequestProgress]:
        if item.attempt != pair.decode_attempt:
            return []
        told = pair.merge.take_decode(item)
        return self._report(pair, told) if pair.merge.resend_reason is None else self._resend(pair)

    def _send_to_decode(self, pair: _Pair, request: GenerationRequest) -> list[RequestProgress]:
        pair.decode_attempt = request.attempt
        try:
            self.decode.add_request(request)
        except RequestRejected as error:
            key, attempt = request.key, pair.request.attempt
            return self._report(pair, RequestProgress(key=key, attempt=attempt, finish_reason=FinishReason.FAILED, error=str(error)))
        return []

    def _resend(self, pair: _Pair) -> list[RequestProgress]:
        """Sends the request to the decode engine anew: it computes the KV itself and continues after the reported tokens."""
        assert pair.decode_attempt is not None, "only the decode engine's progress can require it"
        self._cancel_engines(pair.request.key)
        output_ids = pair.request.output_ids + pair.merge.first_ids
        again = replace(pair.request, output_ids=output_ids, attempt=pair.decode_attempt + 1)
        pair.has_prefill = False
        pair.merge = PairedProgress(again)
        pair.merge.lose_prefill()
        return self._send_to_decode(pair, again)

    def _report(self, pair: _Pair, told: RequestProgress | None) -> list[RequestProgress]:
        """`told` under the caller's attempt number; if it is the ending, removes the request from both engines."""
        if told is None:
            return []
        if told.finish_reason is not None:
            del self._pairs[told.key]
            self._cancel_engines(told.key)
        return [replace(told, attempt=pair.request.attempt)]

    def _cancel_engines(self, key: RequestKey) -> None:
        self.prefill.cancel(key)
        self.decode.cancel(key)
