from __future__ import annotations

from replicas.scheduling.tier_loads import MAX_TIERS, tier_loads
from replicas.stats import TierLoad
from tests.unit.scheduler_steps import new_request, new_scheduler, step


def test_loads_by_priority_count_running_waiting_and_uncomputed() -> None:
    scheduler = new_scheduler(budget=8, max_num_seqs=2)
    scheduler.add(new_request("urgent", num_prompt=4))
    scheduler.add(new_request("long", num_prompt=20, first=100, priority=5))
    step(scheduler)  # 4 tokens of each: the budget of 8
    scheduler.add(new_request("last", num_prompt=7, first=200, priority=5))
    assert tier_loads(scheduler.running, scheduler.waiting) == (
        TierLoad(0, num_running=1, num_context_tokens=4),
        TierLoad(5, num_running=1, num_waiting=1, num_uncomputed_tokens=16 + 7, num_context_tokens=4),
    )


def test_request_whose_kv_comes_from_elsewhere_has_nothing_to_compute() -> None:
    scheduler = new_scheduler()
    state = scheduler.add(new_request("one", num_prompt=9))
    scheduler.expect_load(state.key)
    assert tier_loads(scheduler.running, scheduler.waiting) == (TierLoad(0, num_waiting=1),)
    scheduler.schedule()
    assert tier_loads(scheduler.running, scheduler.waiting) == (TierLoad(0, num_running=1),)


def test_more_priorities_than_tiers_share_the_last_one() -> None:
    scheduler = new_scheduler()
    for priority in range(MAX_TIERS + 3):
        scheduler.add(new_request(f"r{priority}", num_prompt=3, first=10 * priority, priority=priority))
    loads = tier_loads(scheduler.running, scheduler.waiting)
    assert [load.priority for load in loads] == list(range(MAX_TIERS))
    assert [load.num_waiting for load in loads] == [1] * (MAX_TIERS - 1) + [4]
    assert loads[-1].num_uncomputed_tokens == 12
