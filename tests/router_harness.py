"""A router with its requests and reports, for tests of routing: replicas are reports, requests are sizes and keys."""

from __future__ import annotations

from kvcache.events import BlockStored
from kvcache.hashing import CacheIdentity, block_keys
from replicas.engine_config import Role
from replicas.stats import ReplicaReport, ReplicaStats, TierLoad
from router.config import PolicyName, RouterConfig
from router.policies.policy_choice import make_policy
from router.router import Router
from router.snapshot import Decision, Rejection, RoutingRequest

BLOCK = 16
RATE = 1_000.0  # prompt tokens a second of every replica here
POLICIES: tuple[PolicyName, ...] = ("scoring", "least_loaded", "round_robin", "power_of_two", "longest_prefix", "consistent_hash")


def make_router(policy: PolicyName = "scoring", served: frozenset[str] | None = None, **fields: object) -> Router:
    config = RouterConfig(policy=policy, **fields)  # type: ignore[arg-type]
    return Router(config, make_policy(config), served=served)


def report(
    replica_id: str = "r0",
    *,
    epoch: int = 1,
    first_event: int = 0,
    keys: tuple[bytes, ...] = (),
    is_draining: bool = False,
    model: str = "m",
    role: Role = "unified",
    tiers: tuple[TierLoad, ...] = (),
    **stats: float,
) -> ReplicaReport:
    root = CacheIdentity().root_key()
    fields = {"num_blocks": 10_000, "num_free_blocks": 10_000, "prefill_tokens_per_s": RATE, "decode_step_s": 0.01, "tiers": tiers} | stats
    return ReplicaReport(
        replica_id=replica_id,
        model=model,
        epoch=epoch,
        stats=ReplicaStats(**fields),  # type: ignore[arg-type]
        block_size=BLOCK,
        max_num_seqs=64,
        first_event=first_event,
        events=tuple(BlockStored(key, parent) for parent, key in zip((root, *keys), keys, strict=False)),
        is_draining=is_draining,
        role=role,
    )


def keys_of(*tokens: int, length: int) -> tuple[bytes, ...]:
    """Block keys of a prompt of `length` blocks: the given blocks' tokens, then the last of them for ever."""
    blocks = [*tokens, *[tokens[-1]] * (length - len(tokens))]
    return tuple(block_keys(CacheIdentity(), [token for token in blocks for _ in range(BLOCK)], BLOCK))


def request(
    request_id: str,
    *,
    tokens: int = 160,
    keys: tuple[bytes, ...] = (),
    priority: int = 0,
    tenant: str = "a",
    model: str = "m",
    num_choices: int = 1,
    attempt: int = 0,
    excluded: frozenset[str] = frozenset(),
    is_alone: bool = False,
    is_whole: bool = False,
    caller: str = "",
    arrival_s: float = 0.0,
) -> RoutingRequest:
    return RoutingRequest(
        request_id=request_id,
        model=model,
        num_prompt_tokens=tokens,
        max_tokens=64,
        block_keys=keys,
        priority=priority,
        tenant=tenant,
        num_choices=num_choices,
        attempt=attempt,
        excluded_replicas=excluded,
        is_alone=is_alone,
        is_whole=is_whole,
        arrival_s=arrival_s,
        caller=caller,
    )


def replicas_of(answers: list[Decision | Rejection]) -> list[str]:
    return [answer.replica_id for answer in answers if isinstance(answer, Decision)]


def state_of(router: Router, replica_id: str = "r0", now_s: float = 0.0) -> dict[str, object]:
    model = router.describe(now_s)["m"]
    assert isinstance(model, dict)
    state: dict[str, object] = model["replicas"][replica_id]
    return state
