"""Prefill on one engine and decode on another, as one engine: what a gateway does with two pools, inside one process."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal, get_args

from replicas.async_engine import KVChanges
from replicas.engine import Engine
from replicas.engine_config import EngineConfig
from replicas.engine_loader import load_engine
from replicas.handoff_wiring import InProcessWiring, ProcessGroupWiring
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected, StepOutput
from replicas.stats import ReplicaStats

Transfer = Literal["in-process", "process-group"]


@dataclass(slots=True)
class _Pair:
    """One request on its way through both engines."""

    request: GenerationRequest
    num_emitted: int = 0
    num_decoded: int = 0  # tokens that the decode engine has reported, those of the prefill among them
    num_cached_tokens: int = 0
    is_decoding: bool = False


class DisaggregatedEngine:
    """Owns a prefill engine and a decode engine, and steps both on the caller's thread.

    The decode engine begins to pull when the first chunk of a prefill is computed. The first token is reported by
    whichever has it first and dropped when the other repeats it; a prefill that fails leaves the decode engine to do
    it all.
    """

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        if prefill.handoffs is None or decode.handoffs is None:
            raise ValueError("role must be prefill for the one engine and decode for the other: a unified one hands nothing over")
        self.prefill, self.decode = prefill, decode
        self._pairs: dict[RequestKey, _Pair] = {}
        self._unreported: list[RequestProgress] = []

    @classmethod
    def load(
        cls, config: EngineConfig, transfer: Transfer = "in-process", decode_config: EngineConfig | None = None
    ) -> DisaggregatedEngine:
        """Loads both, of one model; `decode_config` is the decode engine's when it differs. Raises ValueError naming the setting."""
        if transfer not in get_args(Transfer):
            raise ValueError(f"transfer must be one of {', '.join(get_args(Transfer))}, got {transfer!r}")
        changed = threading.Event()
        wiring = InProcessWiring(changed) if transfer == "in-process" else ProcessGroupWiring(changed)
        prefill = load_engine(replace(config, role="prefill"), wiring)
        return cls(prefill, load_engine(replace(decode_config or config, role="decode"), wiring))

    @property
    def tokenizer_source(self) -> str:
        return self.prefill.tokenizer_source

    @property
    def has_work(self) -> bool:
        return bool(self._pairs or self._unreported) or self.prefill.has_work or self.decode.has_work

    def add_request(self, request: GenerationRequest) -> None:
        """Raises RequestRejected when either engine could never serve it."""
        if request.key in self._pairs:
            raise RequestRejected(f"request {request.request_id!r} choice {request.choice} is already running")
        num_tokens, longest = len(request.prompt_ids), self.decode.description.max_model_len
        if num_tokens + (0 if request.params.max_tokens == 0 else 1) > longest:
            raise RequestRejected(f"the prompt has {num_tokens} tokens; the decode engine's max_model_len is {longest}")
        if request.wants_prompt_logprobs:  # they need every position's logits, and so one engine that computes them all
            self.decode.add_request(request)
            self._pairs[request.key] = _Pair(request, is_decoding=True)
            return
        self.prefill.add_request(replace(request, wants_handoff=True))
        self._pairs[request.key] = _Pair(request)

    def cancel(self, key: RequestKey) -> bool:
        pair = self._pairs.pop(key, None)
        if pair is None:
            return False
        self._cancel_engines(key)
        self._unreported.append(RequestProgress(key=key, attempt=pair.request.attempt, finish_reason=FinishReason.CANCELLED))
        return True

    def step(self) -> StepOutput:
        """One step of each engine; waits a little for transfers when neither has anything to compute."""
        outputs = []
        progress, self._unreported = self._unreported, []
        for engine, take in ((self.prefill, self._take_prefill), (self.decode, self._take_decode)):
            output = engine.step(may_wait=False)
            outputs.append(output)
            for item in output.progress:
                pair = self._pairs.get(item.key)
                if pair is not None and pair.request.attempt == item.attempt:
                    progress += take(pair, item)
        is_idle = not progress and not any(o.num_prefill_tokens + o.num_decode_tokens for o in outputs)
        if is_idle and self.has_work:
            assert self.decode.handoffs is not None
            self.decode.handoffs.wait()
        return StepOutput(
            progress=tuple(progress),
            num_prefill_tokens=sum(o.num_prefill_tokens for o in outputs),
            num_decode_tokens=sum(o.num_decode_tokens for o in outputs),
            num_preemptions=sum(o.num_preemptions for o in outputs),
            step_s=sum(o.step_s for o in outputs),
        )

    def wake(self) -> None:
        """From any thread: a step that waits for transfers ends at once."""
        self.prefill.wake()
        self.decode.wake()

    def stats(self) -> ReplicaStats:
        """The decode engine's, with the prefill engine's queue and prefill rate."""
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
        """The prefill engine's: prefixes are looked for there."""
        return self.prefill.kv_changes(since)

    def close(self) -> None:
        self._pairs.clear()
        self.decode.close()
        self.prefill.close()

    def _take_prefill(self, pair: _Pair, item: RequestProgress) -> list[RequestProgress]:
        pair.num_cached_tokens = max(pair.num_cached_tokens, item.num_cached_tokens)
        reported: list[RequestProgress] = []
        if item.token_ids and pair.num_emitted == 0:
            pair.num_emitted = len(item.token_ids)
            reported.append(replace(item, handoff=None, finish_reason=None, stop_token_id=None))
        if item.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            return self._end(pair, reported[-1] if reported else item, item)
        if not pair.is_decoding and (item.handoff is not None or item.finish_reason is not None):
            pair.is_decoding = True
            try:
                self.decode.add_request(replace(pair.request, handoff=item.handoff))
            except RequestRejected as error:
                rejected = RequestProgress(key=item.key, attempt=item.attempt, finish_reason=FinishReason.FAILED, error=str(error))
                return reported + self._end(pair, rejected, rejected)
        return reported

    def _take_decode(self, pair: _Pair, item: RequestProgress) -> list[RequestProgress]:
        num_known = max(0, min(len(item.token_ids), pair.num_emitted - pair.num_decoded))
        pair.num_decoded += len(item.token_ids)
        new_ids = item.token_ids[num_known:]
        # A token that came with the handoff has no log-probability here: the prefill has reported it.
        logprobs = item.logprobs[max(0, len(item.logprobs) - len(new_ids)) :]
        item = replace(item, token_ids=new_ids, logprobs=logprobs, num_cached_tokens=pair.num_cached_tokens)
        pair.num_emitted = max(pair.num_emitted, pair.num_decoded)
        if item.finish_reason is not None:
            return self._end(pair, item, item)
        return [item] if item.token_ids else []

    def _end(self, pair: _Pair, item: RequestProgress, ending: RequestProgress) -> list[RequestProgress]:
        """The one last progress: `item` with the ending, and nothing left of the request in either engine."""
        del self._pairs[item.key]
        self._cancel_engines(item.key)
        return [replace(item, handoff=None, finish_reason=ending.finish_reason, stop_token_id=ending.stop_token_id, error=ending.error)]

    def _cancel_engines(self, key: RequestKey) -> None:
        self.prefill.cancel(key)
        self.decode.cancel(key)
