"""Targets: which entry counts, how a client lowers it, and that the router serves by it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from cluster.generation.prepared_generation import routing_request
from cluster.generation.request_context import RequestContext
from cluster.principal import Principal
from cluster.settings.gateway_config import GatewayConfig
from cluster.settings.latency_targets import LatencyTarget, target_for
from cluster.settings.priorities import PriorityRules
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import Tokenizer
from router.config import RouterConfig
from tests.unit.fake_engine import EchoEngine
from tests.unit.in_process_cluster import CHAT, MODEL, TEXT, InProcessCluster, client_of, running_cluster

URGENT = LatencyTarget(priority=-5, ttft_s=0.5, tpot_s=0.05)
NORMAL = LatencyTarget(priority=0, ttft_s=2.0)
BATCH = LatencyTarget(priority=10, tpot_s=1.0)
TARGETS = (URGENT, NORMAL, BATCH)


@pytest.mark.parametrize(
    ("priority", "target"), [(-6, None), (-5, URGENT), (-1, URGENT), (0, NORMAL), (9, NORMAL), (10, BATCH), (1000, BATCH)]
)
def test_entry_counts_for_its_priority_and_less_urgent_ones_up_to_the_next(priority: int, target: LatencyTarget | None) -> None:
    assert target_for(TARGETS, priority) == target


def test_without_entries_nothing_has_a_target() -> None:
    assert target_for((), 0) is None


@pytest.mark.parametrize(
    ("priority", "asked_ttft_s", "asked_tpot_s", "expected"),
    [
        (-5, None, None, URGENT),
        (-5, 0.1, None, LatencyTarget(priority=-5, ttft_s=0.1, tpot_s=0.05)),
        (-5, 9.0, 0.01, LatencyTarget(priority=-5, ttft_s=0.5, tpot_s=0.01)),
        (0, 1.0, 0.01, LatencyTarget(priority=0, ttft_s=1.0)),  # no target of the configuration to be lowered
        (-6, 1.0, 0.01, None),
    ],
)
def test_headers_lower_a_target_and_never_raise_or_make_one(
    priority: int, asked_ttft_s: float | None, asked_tpot_s: float | None, expected: LatencyTarget | None
) -> None:
    context = RequestContext(principal=Principal(), arrival_s=0.0, asked_ttft_s=asked_ttft_s, asked_tpot_s=asked_tpot_s)
    assert context.target(TARGETS, priority) == expected


def test_resend_with_tokens_out_has_no_deadline_of_the_first_one() -> None:
    request = GenerationRequest(request_id="a", prompt_ids=(1,), params=SamplingParams(max_tokens=5), seed=0, deadline_s=12.0)

    def deadline_of(output_ids: tuple[int, ...]) -> float | None:
        sent = GenerationRequest(
            request_id="a", prompt_ids=(1,), params=request.params, seed=0, deadline_s=12.0, output_ids=output_ids, attempt=1
        )
        return routing_request("m", sent, block_size=16, weights_version="", num_choices=1).deadline_s

    assert deadline_of(()) == 12.0
    assert deadline_of((7,)) is None


@pytest.mark.parametrize(
    ("headers", "ttft_s"),
    [
        ({}, 2.0),
        ({"X-TTFT-Target-Ms": "500"}, 0.5),
        ({"X-TTFT-Target-Ms": "60000"}, 2.0),
        ({"X-Priority": "-3"}, 0.5),
        ({"X-Priority": "-9"}, None),
        ({"X-Priority": "20", "X-TTFT-Target-Ms": "500"}, None),
    ],
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_deadline_at_router_and_replica_is_arrival_plus_target(
    default_tokenizer: Tokenizer, path: str, headers: dict[str, str], ttft_s: float | None
) -> None:
    prompt = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    config = GatewayConfig(priorities=PriorityRules(highest=None))
    async with running_cluster(default_tokenizer, config=config, targets=TARGETS) as cluster, client_of(cluster) as client:
        answer = await client.post(path, json={"model": MODEL, "max_tokens": 2, **prompt}, headers=headers)
    assert answer.status_code == 200
    for request in (*cluster.backend.routed, *cluster.backend.sent):
        waited = None if request.deadline_s is None else request.deadline_s - request.arrival_s
        assert waited == (None if ttft_s is None else pytest.approx(ttft_s))


async def wait_queued(cluster: InProcessCluster, count: int) -> None:
    """Waits until two requests are sent, one to run and one to wait inside, and `count` wait in the router."""
    async with asyncio.timeout(30):
        while (len(cluster.backend.sent), (await cluster.backend.describe_router()).get(MODEL, {}).get("num_waiting")) != (2, count):
            await asyncio.sleep(0.002)  # nothing tells of the router's view


@pytest.mark.parametrize(("later_headers", "order"), [({}, ["first", "later"]), ({"X-TTFT-Target-Ms": "5000"}, ["later", "first"])])
async def test_router_serves_the_earlier_deadline_first(
    default_tokenizer: Tokenizer, later_headers: dict[str, str], order: list[str]
) -> None:
    def one_at_a_time() -> EchoEngine:
        return EchoEngine(eos_token_id=min(default_tokenizer.eos_token_ids), vocab_size=default_tokenizer.vocab_size, max_num_seqs=1)

    config, targets = RouterConfig(dispatch_ahead=1), (LatencyTarget(ttft_s=60.0),)
    async with (
        running_cluster(default_tokenizer, router_config=config, targets=targets, make_engine=one_at_a_time) as cluster,
        client_of(cluster) as client,
    ):
        engine = cluster.replicas[0].engine
        engine.gate.clear()

        def post(prompt: str, headers: dict[str, str]) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post(TEXT, json={"model": MODEL, "prompt": prompt, "max_tokens": 1}, headers=headers))

        calls = [post("before", {}) for _ in range(4)]
        await wait_queued(cluster, 2)
        calls.append(post("first", {}))
        await wait_queued(cluster, 3)
        calls.append(post("later", later_headers))
        await wait_queued(cluster, 4)
        engine.gate.set()
        await asyncio.gather(*calls)
    served = [default_tokenizer.decode(request.prompt_ids) for request in cluster.backend.sent]
    assert [prompt for prompt in served if prompt != "before"] == order
