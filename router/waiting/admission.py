"""The queue of one model's waiting requests: in tiers by priority, fair between tenants, by slack within a tenant."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from router.config import RouterConfig
from router.snapshot import RoutingRequest

_MAX_IDLE_TENANTS = 10_000
"""Maximum number of idle tenants whose counters are kept, over all tiers."""
_MAX_IDLE_TIERS = 64
_MAX_LOCALITY_TENANTS = 8


class Waiting:
    """One request in the queue. `sort_key` orders it within its tenant; after `late_s` it can no longer meet its deadline."""

    __slots__ = (
        "is_gone",
        "is_held",
        "is_in_heap",
        "is_late",
        "late_s",
        "num_tokens",
        "request",
        "sequence",
        "sort_key",
        "submitted_s",
        "tenant",
        "tier",
        "wanted",
        "wanted_s",
        "wanted_tokens",
    )

    def __init__(self, request: RoutingRequest, submitted_s: float, sequence: int, tier: int, tenant: str) -> None:
        self.request = request
        self.submitted_s = submitted_s
        self.sequence = sequence
        self.tier = tier
        self.tenant = tenant
        self.num_tokens = request.num_prompt_tokens
        self.sort_key = 0.0
        self.late_s: float | None = None
        self.is_gone = False  # dispatched or cancelled; heaps and lines drop it when they reach it
        self.is_held = False  # passed over in this step
        self.is_in_heap = False
        self.is_late = False
        self.wanted: tuple[str, ...] = ()  # the full replicas that it waits for, as decided at `wanted_s`
        self.wanted_s = 0.0
        self.wanted_tokens = 0  # prompt tokens that it would compute on the first of them

    def __lt__(self, other: Waiting) -> bool:
        return (self.sort_key, self.sequence) < (other.sort_key, other.sequence)


class _Line:
    """Requests in order of arrival; any of them may leave."""

    def __init__(self) -> None:
        self._line: deque[Waiting] = deque()
        self._num_gone = 0

    def append(self, waiting: Waiting) -> None:
        self._line.append(waiting)

    def note_gone(self) -> None:
        self._num_gone += 1
        if self._num_gone > 64 and self._num_gone * 2 > len(self._line):
            self._line = deque(waiting for waiting in self._line if not waiting.is_gone)
            self._num_gone = 0

    def oldest(self) -> Waiting | None:
        """The first request that is neither gone nor held."""
        while self._line and self._line[0].is_gone:
            self._line.popleft()
            self._num_gone -= 1
        return next((waiting for waiting in self._line if not (waiting.is_gone or waiting.is_held)), None)

    def newest(self) -> Waiting | None:
        while self._line and self._line[-1].is_gone:
            self._line.pop()
            self._num_gone -= 1
        return self._line[-1] if self._line else None


class _TenantQueue:
    """One tenant's waiting requests within a tier: first those that can be on time, by slack; then the late ones, by age."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_dispatched = 0
        self._on_time: list[Waiting] = []  # a heap
        self._late: deque[Waiting] = deque()

    def push(self, waiting: Waiting) -> None:
        if not waiting.is_in_heap and not waiting.is_late:
            heapq.heappush(self._on_time, waiting)
            waiting.is_in_heap = True

    def compact(self) -> None:
        """Drops requests that are gone, once they are the majority."""
        if len(self._on_time) + len(self._late) > 2 * self.num_waiting + 64:
            self._on_time = [waiting for waiting in self._on_time if not waiting.is_gone]
            heapq.heapify(self._on_time)
            self._late = deque(waiting for waiting in self._late if not waiting.is_gone)

    def peek(self, now_s: float, late_share: int) -> Waiting | None:
        """The next request that is not held. Every `late_share`-th dispatch goes to a late one, so that none waits forever."""
        while self._on_time:
            head = self._on_time[0]
            is_late = head.late_s is not None and head.late_s < now_s
            if not (head.is_gone or head.is_held or is_late):
                break
            heapq.heappop(self._on_time).is_in_heap = False  # a held request returns by `push` when the step ends
            if is_late and not (head.is_gone or head.is_held):
                head.is_late = True
                self._late.append(head)
        while self._late and self._late[0].is_gone:
            self._late.popleft()
        late = next((waiting for waiting in self._late if not (waiting.is_gone or waiting.is_held)), None)
        if late is not None and (not self._on_time or self.num_dispatched % late_share == late_share - 1):
            return late
        return self._on_time[0] if self._on_time else None


class _Tier:
    def __init__(self) -> None:
        self.tenants: dict[str, _TenantQueue] = {}  # tenant -> queue, only of tenants with waiting requests
        self.counters: dict[str, float] = {}  # tenant -> virtual token counter, also of idle tenants
        self.line = _Line()
        self.num_waiting = 0
        self.num_tokens = 0
        self.last_counter = 0.0  # the counter of the tenant that left last

    def floor(self) -> float:
        """The smallest counter of the active tenants; without any, the counter of the last one to leave."""
        return min([self.counters[tenant] for tenant in self.tenants], default=self.last_counter)


class AdmissionQueue:
    """Owns one model's waiting requests and its tenants' service counters.

    - Tiers: the smallest priority first. A request that waited `aging_s` per level of difference may pass, at most one in
      `aging_share` dispatches, so a flood below delays an urgent request by one dispatch and no request waits forever.
    - Within a tier: the virtual token counter (VTC, arXiv 2401.00588). The backlogged tenant with the least service is
      next; the counter of a tenant that returns is raised to the smallest of the active ones. Service counts computed and generated
      tokens; `fair_cached_weight` weighs cached ones (locality as in arXiv 2501.14312).
    - Within a tenant: least slack to the deadline; requests that can no longer be on time come last.
    """

    def __init__(self, config: RouterConfig, cached_tokens: Callable[[RoutingRequest], int] | None = None) -> None:
        """`cached_tokens` gives the number of a prompt's tokens that some replica has cached; called only with a locality quantum."""
        self._config = config
        self._has_tiers = "priority" in config.orders
        self._is_fair = "fair" in config.orders
        self._by_slack = "slo" in config.orders
        self._cached_tokens = cached_tokens
        self._tiers: dict[int, _Tier] = {}
        self._by_id: dict[str, Waiting] = {}
        self._num_by_tenant: dict[str, int] = {}
        self._sequence = 0
        self._since_aged = config.aging_share

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._by_id.values())

    @property
    def num_tokens(self) -> int:
        return sum(tier.num_tokens for tier in self._tiers.values())

    def num_waiting_of(self, tenant: str) -> int:
        return self._num_by_tenant.get(tenant, 0)

    def num_waiting_by_tier(self) -> dict[int, int]:
        return {number: tier.num_waiting for number, tier in self._tiers.items() if tier.num_waiting}

    def num_tokens_ahead(self, priority: int) -> int:
        """Prompt tokens of requests that wait at `priority` or better."""
        tier = self._tier_of(priority)
        return sum(queue.num_tokens for number, queue in self._tiers.items() if number <= tier)

    def submit(self, request: RoutingRequest, now_s: float, expected_prefill_s: float) -> None:
        """Adds a request; no request with its id may be waiting here."""
        tier_number = self._tier_of(request.priority)
        tenant = request.tenant if self._is_fair else ""
        waiting = Waiting(request, now_s, self._sequence, tier_number, tenant)
        self._sequence += 1
        if self._by_slack:
            since_s = request.arrival_s if request.attempt else now_s  # a resend goes before requests that waited less
            due_s = request.deadline_s if request.deadline_s is not None else since_s + self._config.default_ttft_slo_s
            waiting.sort_key = due_s - expected_prefill_s
            waiting.late_s = waiting.sort_key if request.deadline_s is not None else None
        tier = self._tiers.get(tier_number)
        if tier is None:
            if len(self._tiers) >= _MAX_IDLE_TIERS:
                self._tiers = {number: kept for number, kept in self._tiers.items() if kept.num_waiting}
            tier = self._tiers[tier_number] = _Tier()
        queue = tier.tenants.get(tenant)
        if queue is None:
            self._lift(tier, tenant)
            queue = tier.tenants[tenant] = _TenantQueue()
        queue.push(waiting)
        queue.num_waiting += 1
        tier.line.append(waiting)
        tier.num_waiting += 1
        tier.num_tokens += waiting.num_tokens
        self._by_id[request.request_id] = waiting
        self._num_by_tenant[request.tenant] = self._num_by_tenant.get(request.tenant, 0) + 1

    def peek(self, now_s: float) -> Waiting | None:
        """The next request that is not held; None when there is none."""
        if not self._by_id:
            return None
        numbers = sorted([number for number, tier in self._tiers.items() if tier.num_waiting])
        aged = self._aged(numbers, now_s)
        if aged is not None:
            return aged
        for number in numbers:
            found = self._next_in(self._tiers[number], now_s)
            if found is not None:
                return found
        return None

    def hold(self, waiting: Waiting) -> None:
        """Makes `peek` pass over a request until `restore`."""
        waiting.is_held = True

    def restore(self, held: list[Waiting]) -> None:
        """Puts held requests back in their places."""
        for waiting in held:
            waiting.is_held = False
            queue = self._tiers[waiting.tier].tenants.get(waiting.tenant)
            if not waiting.is_gone and queue is not None:
                queue.push(waiting)

    def dispatch(self, waiting: Waiting, num_uncached_tokens: int, num_output_tokens: int, now_s: float) -> None:
        """Removes a request and charges its tenant for the expected service."""
        best = min(number for number, tier in self._tiers.items() if tier.num_waiting)
        is_aged = waiting.tier > best and self._is_old(waiting, best, now_s)
        self._since_aged = 0 if is_aged else self._since_aged + 1
        tier = self._tiers[waiting.tier]
        tier.tenants[waiting.tenant].num_dispatched += 1
        config = self._config
        num_cached = waiting.num_tokens - num_uncached_tokens
        service = config.fair_input_weight * num_uncached_tokens + config.fair_cached_weight * num_cached
        self.charge(waiting.request, service + config.fair_output_weight * num_output_tokens)
        self._remove(waiting)

    def charge(self, request: RoutingRequest, service: float) -> None:
        """Adds service (negative to give back) to the counter of the request's tenant."""
        tier = self._tiers.get(self._tier_of(request.priority))
        tenant = request.tenant if self._is_fair else ""
        if tier is not None and tenant in tier.counters:
            tier.counters[tenant] += service / self._config.tenant_weights.get(tenant, 1.0)

    def cancel(self, request_id: str) -> bool:
        """Removes a request; False when it is not waiting here."""
        waiting = self._by_id.get(request_id)
        if waiting is None:
            return False
        self._remove(waiting)
        return True

    def pop_lowest_below(self, priority: int) -> RoutingRequest | None:
        """Removes the newest request of the lowest tier if that tier is below `priority`, to make room for a more urgent one."""
        number = max((number for number, tier in self._tiers.items() if tier.num_waiting), default=None)
        if number is None or number <= self._tier_of(priority):
            return None
        waiting = self._tiers[number].line.newest()
        assert waiting is not None, "a tier that counts waiting requests has none"
        self._remove(waiting)
        return waiting.request

    def describe(self) -> dict[str, object]:
        """Plain JSON values for debugging."""
        return {
            str(number): {
                "num_waiting": tier.num_waiting,
                "num_tokens": tier.num_tokens,
                "tenants": {
                    tenant: {"num_waiting": queue.num_waiting, "service": round(tier.counters[tenant], 1)}
                    for tenant, queue in list(tier.tenants.items())[:100]
                },
            }
            for number, tier in sorted(self._tiers.items())
        }

    def _tier_of(self, priority: int) -> int:
        return priority if self._has_tiers else 0

    def _is_old(self, waiting: Waiting, best: int, now_s: float) -> bool:
        return now_s - waiting.submitted_s >= (waiting.tier - best) * self._config.aging_s

    def _aged(self, numbers: list[int], now_s: float) -> Waiting | None:
        """The most overdue request that may pass the best tier by age."""
        if self._since_aged < self._config.aging_share - 1 or len(numbers) == 1:
            return None
        best = numbers[0]
        oldest = [waiting for number in numbers[1:] if (waiting := self._tiers[number].line.oldest()) is not None]
        aged = [waiting for waiting in oldest if self._is_old(waiting, best, now_s)]
        return min(aged, key=lambda waiting: waiting.submitted_s + waiting.tier * self._config.aging_s, default=None)

    def _next_in(self, tier: _Tier, now_s: float) -> Waiting | None:
        share = self._config.aging_share
        if not tier.tenants:
            return None
        has_quantum = self._cached_tokens is not None and self._config.locality_quantum_tokens > 0
        if not has_quantum:
            first = min(tier.tenants, key=tier.counters.__getitem__)
            head = tier.tenants[first].peek(now_s, share)
            if head is not None:
                return head
        heads = sorted((tier.counters[tenant], tenant) for tenant in tier.tenants)
        near: list[Waiting] = []
        for counter, tenant in heads:
            if near and counter > heads[0][0] + self._config.locality_quantum_tokens:
                break
            head = tier.tenants[tenant].peek(now_s, share)
            if head is None:
                continue
            if not has_quantum:
                return head
            near.append(head)
            if len(near) == _MAX_LOCALITY_TENANTS:
                break
        if not near:
            return None
        cached_tokens = self._cached_tokens
        assert cached_tokens is not None
        return max(near, key=lambda waiting: cached_tokens(waiting.request))

    def _lift(self, tier: _Tier, tenant: str) -> None:
        """Raises the counter of a tenant that was idle to the smallest of the active ones: idle time earns no credit."""
        known = tier.counters.get(tenant)
        floor = tier.floor()
        tier.counters[tenant] = floor if known is None else max(known, floor)
        if known is None:
            self._bound_idle(tenant)

    def _bound_idle(self, newest: str) -> None:
        """Forgets half of the idle tenants of all tiers when there are too many, because clients choose the names.

        Those least ahead of their tier's floor go first: forgetting resets them to the floor, which for most changes nothing.
        """
        num_idle = sum(len(tier.counters) - len(tier.tenants) for tier in self._tiers.values())
        if num_idle <= _MAX_IDLE_TENANTS:
            return
        idle: list[tuple[float, int, str]] = []
        for number, tier in self._tiers.items():
            floor = tier.floor()
            idle += [
                (counter - floor, number, other)
                for other, counter in tier.counters.items()
                if other not in tier.tenants and other != newest
            ]
        idle.sort()
        for _, number, other in idle[: len(idle) // 2]:
            del self._tiers[number].counters[other]

    def _remove(self, waiting: Waiting) -> None:
        request = waiting.request
        waiting.is_gone = True
        del self._by_id[request.request_id]
        tier = self._tiers[waiting.tier]
        tier.line.note_gone()
        tier.num_waiting -= 1
        tier.num_tokens -= waiting.num_tokens
        queue = tier.tenants[waiting.tenant]
        queue.num_waiting -= 1
        if queue.num_waiting:
            queue.compact()
        else:
            tier.last_counter = tier.counters[waiting.tenant]
            del tier.tenants[waiting.tenant]
        left = self._num_by_tenant[request.tenant] - 1
        if left:
            self._num_by_tenant[request.tenant] = left
        else:
            del self._num_by_tenant[request.tenant]
