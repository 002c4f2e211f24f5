"""The router's logic over all models: admission, bookings, prefix index and policy. No clock, no I/O."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from dataclasses import replace

from replicas.stats import ReplicaReport, ReportReply
from router.config import RouterConfig
from router.model_router import ModelRouter
from router.policies.policy import Policy
from router.policies.recording import DecisionSink
from router.routing_statistics import RoutingStatistics
from router.snapshot import Decision, Rejection, RoutingRequest

_EXTENSION = re.compile(r"(-\d{1,6}){0,3}", re.ASCII)
"""What an answer's id has behind it in requests: the prompt's number, and those of choice and attempt after a loss."""


class Router:
    """Routes requests of any number of models, each with a queue of its own; models share only the configuration.

    The caller owns time: `now_s` is Unix time in seconds (deadlines are compared with it) and never decreases. Calls are cheap and
    never wait. Use: `submit` requests and apply reports, then call `step` and deliver its answers; call `step` after each of these
    calls, and at `next_wakeup_s`. Every submitted request that is not cancelled gets exactly one answer. A decision is booked in the
    step that makes it, until `release` or `cancel`; on the prefill replica of a pair until `release_prefill` at the latest.
    """

    def __init__(
        self, config: RouterConfig, policy: Policy, sink: DecisionSink | None = None, served: frozenset[str] | None = None
    ) -> None:
        """`sink` is called with each decision and all its inputs (`router.policies.recording`). `served` are the models of the
        configuration: requests for others are rejected at once, because no replica of them will come. None serves any model."""
        self._config = config
        self._policy = policy
        self._sink = sink
        self._served = served
        self._refused: list[Rejection] = []
        self._num_not_served: Counter[str] = Counter()  # model -> requests; gateways of older configurations name them
        self._models: dict[str, ModelRouter] = {}
        self._model_of_replica: dict[str, str] = {}
        self._model_of_request: dict[str, str] = {}  # waiting and booked requests
        self._explained: OrderedDict[str, Decision | Rejection] = OrderedDict()  # request id -> its last answer
        self._fenced: frozenset[str] = frozenset()

    @property
    def models(self) -> tuple[str, ...]:
        """Models that have, or had, a replica or a request; a model that is no longer served only while it has a replica."""
        return tuple(self._models)

    @property
    def num_waiting(self) -> int:
        return sum(model.num_waiting for model in self._models.values())

    def submit(self, request: RoutingRequest, now_s: float) -> None:
        """Queues the request; a later `step` answers it.

        The id of a dispatched request may be submitted again (a resend after a replica died): its old booking ends. Raises ValueError
        when a request with this id is already waiting, for any model.
        """
        known = self._model_of_request.get(request.request_id)
        if known is not None and known != request.model:
            other = self._models[known]
            if other.is_waiting(request.request_id):
                raise ValueError(f"request_id must be unique among waiting requests, got {request.request_id!r} again")
            other.release(request.request_id, now_s)
        if not self._serves(request.model):
            reason = f"the model {request.model!r} was taken out of the configuration"
            self._num_not_served[request.model] += 1
            self._refused.append(Rejection(request_id=request.request_id, reason=reason, retry_after_s=1.0, kind="not_served"))
            return
        self._model(request.model).submit(request, now_s)
        self._model_of_request[request.request_id] = request.model

    def step(self, now_s: float) -> list[Decision | Rejection]:
        """Dispatches and books the requests that may go now; returns these decisions, and the rejections since the last step."""
        answers = [*self._refused, *(answer for model in self._models.values() for answer in model.step(now_s))]
        self._refused.clear()
        for answer in answers:
            self._explained[answer.request_id] = answer
            self._explained.move_to_end(answer.request_id)
            if len(self._explained) > self._config.num_explained:
                self._explained.popitem(last=False)
            if isinstance(answer, Rejection):
                self._model_of_request.pop(answer.request_id, None)
        return answers

    def cancel(self, request_id: str, now_s: float) -> None:
        """Removes a request whose caller is gone from the queue, or ends its booking. Unknown ids are ignored."""
        model = self._model_of_request.pop(request_id, None)
        if model is not None:
            self._models[model].cancel(request_id, now_s)

    def release(self, request_id: str, now_s: float, num_output_tokens: int | None = None) -> None:
        """Ends the booking of a dispatched request, however the request ended. Unknown ids are ignored.

        `num_output_tokens` (all choices together) settles the tenant's counter and updates the expected output length.
        """
        model = self._model_of_request.get(request_id)
        if model is not None:
            self._models[model].release(request_id, now_s, num_output_tokens)
            if not self._models[model].has(request_id):
                del self._model_of_request[request_id]

    def release_prefill(self, request_id: str, now_s: float) -> None:
        """Ends a pair's booking on its prefill replica, which has finished or given up. Unknown ids are ignored."""
        model = self._model_of_request.get(request_id)
        if model is not None:
            self._models[model].release_prefill(request_id, now_s)

    def apply_report(self, report: ReplicaReport, now_s: float) -> ReportReply:
        """Applies a replica's report; lost, repeated and reordered reports are harmless. The first report makes a replica a candidate."""
        known = self._model_of_replica.get(report.replica_id)
        if known is not None and known != report.model:
            self._models[known].remove_replica(report.replica_id)
        self._model_of_replica[report.replica_id] = report.model
        return self._model(report.model).apply_report(report, now_s)

    def remove_replica(self, replica_id: str, now_s: float) -> None:
        """Removes a replica with its bookings; it gets no requests until it reports again. Unknown ids are ignored."""
        model = self._model_of_replica.pop(replica_id, None)
        if model is not None:
            self._models[model].remove_replica(replica_id)
            # No request was ever let in here, so nothing else is left.
            if not self._serves(model) and not self._models[model].num_replicas:
                del self._models[model]

    def set_fenced(self, replica_ids: frozenset[str]) -> None:
        """Presumes exactly these replicas hung: they get no requests. Their bookings stay until they are released."""
        self._fenced = replica_ids
        for model in self._models.values():
            model.set_fenced(replica_ids)

    def requests_of(self, caller: str) -> list[str]:
        """Ids of the caller's waiting and booked requests."""
        return [request_id for model in self._models.values() for request_id in model.requests_of(caller)]

    def next_wakeup_s(self, now_s: float) -> float | None:
        """When `step` may have work even if nothing is called before; None when never."""
        if self._refused:
            return now_s
        wakeups = [wakeup_s for model in self._models.values() if (wakeup_s := model.next_wakeup_s(now_s)) is not None]
        return min(wakeups, default=None)

    def explain(self, request_id: str) -> list[Decision | Rejection]:
        """The answers, newest last, to the request and to requests sent on its behalf (ids that extend its own with numbers), among
        the last `num_explained` requests. Decisions have every candidate's terms."""
        return [
            answer
            for known, answer in self._explained.items()
            if known.startswith(request_id) and _EXTENSION.fullmatch(known, len(request_id))
        ]

    def num_serving(self) -> dict[str, int]:
        """Model -> replicas that neither drain nor hang; a model without any may be missing."""
        return {model: router.num_serving for model, router in self._models.items()}

    def statistics(self) -> dict[str, RoutingStatistics]:
        """Counters and load by model, for metrics."""
        found = {model: router.statistics() for model, router in self._models.items()}
        for model, count in self._num_not_served.items():
            one = found.get(model) or ModelRouter(model, self._config, self._policy).statistics()
            found[model] = replace(one, num_rejections={**one.num_rejections, "not_served": count})
        return found

    def describe(self, now_s: float) -> dict[str, object]:
        """The router's whole state by model, as plain JSON values."""
        return {model: router.describe(now_s) for model, router in self._models.items()}

    def _serves(self, model: str) -> bool:
        return self._served is None or model in self._served

    def _model(self, model: str) -> ModelRouter:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelRouter(model, self._config, self._policy, self._sink)
            found.set_fenced(self._fenced)
        return found
