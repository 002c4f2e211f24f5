"""Measures handoffs: the bandwidth of each transport by message size, and the share of a handoff that overlaps the prefill.

    python -m tests.bench.handoff_bench [--sizes-mb 1 4 16 64] [--prompt-tokens 900] [--rounds 5]

The peers of a process group, and of the object store of a Ray that it starts, are threads of one process here, so the bandwidth is
a lower bound for two processes on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable

import ray
import torch

from kvcache.block_pool import BlockPool
from kvcache.handoff import HeadShare, KVHandoff
from kvcache.ownership import Direction, KVOwnership
from kvcache.spec import KVGroupSpec, KVLayout
from kvcache.tensors import KVTensors
from kvcache.transfer.in_process import InProcessConnector
from kvcache.transfer.link import Connector
from kvcache.transfer.process_group import ProcessGroupTransport
from kvcache.transfer.pull import HandoffPull
from kvcache.transfer.remote import RemoteConnector
from kvcache.transfer.server import TransferServer
from kvcache.transfer.source import KVSource
from replicas.engine.disaggregated import DisaggregatedEngine
from replicas.engine_config import EngineConfig
from replicas.model.default_model import prepare_default_model
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.serve.object_store import object_store_transport
from tests.bench.machine import hardware_line

CPU = torch.device("cpu")
GROUP = KVGroupSpec(layers=tuple(range(30)), kind="full", window=None, num_kv_heads=3, k_dim=64, v_dim=64)
BLOCK_SIZE = 16
BLOCK_BYTES = GROUP.num_values_per_token() * BLOCK_SIZE * 4
LAYOUTS = {"equal layouts": KVLayout("hdt", "htd"), "converted": KVLayout("thd", "thd")}


def _side(num_blocks: int, layout: KVLayout) -> KVSource:
    kv = KVTensors([GROUP], layout=layout, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
    kv.fill(range(num_blocks), 1.0)
    return KVSource(KVOwnership(pool=BlockPool(num_blocks, BLOCK_SIZE), epoch=1, lease_s=60.0, clock=time.monotonic), kv)


def _pull_s(giver: KVSource, taker: KVSource, address: str, connector: Connector, num_blocks: int) -> float:
    given, taken = giver.transfers.pool.try_allocate(num_blocks), taker.transfers.pool.try_allocate(num_blocks)
    assert given is not None
    assert taken is not None
    num_tokens = num_blocks * BLOCK_SIZE
    ref = giver.transfers.open(Direction.OUT, given, on_closing=giver.wake)
    giver.offer(ref, given, num_tokens)
    giver.note_computed(ref, num_tokens)
    giver.complete(ref, [0])
    handoff = KVHandoff(
        fingerprint="", layout_id="", block_size=BLOCK_SIZE, dtype="float32", num_tokens=num_tokens, tokens_digest="", layers=(0, 30),
        block_ids=(), epoch=ref.epoch, lease=ref.number, lease_s=60.0, shares=(HeadShare(first=0, end=3, address=address),),
    )  # fmt: skip
    ended = threading.Event()
    load = taker.transfers.open(Direction.IN, taken)
    start_s = time.monotonic()
    pull = HandoffPull(
        handoff, (0, 3), connector=connector, transfers=taker.transfers, kv=taker.kv, on_end=lambda _: ended.set(), deadline_s=60.0,
    )  # fmt: skip
    pull.reserve(load, taken, 0)
    ended.wait(120.0)
    elapsed_s = time.monotonic() - start_s
    assert pull.outcome is not None
    assert pull.outcome.error is None, pull.outcome.error
    taker.transfers.close(load)
    for source, block_ids in ((giver, given), (taker, taken)):
        source.transfers.pool.release(block_ids)
        source.forget(source.transfers.collect())
    return elapsed_s


def _bandwidths(sizes_mb: list[int], rounds: int) -> None:
    num_blocks = -(-max(sizes_mb) * 2**20 // BLOCK_BYTES)
    for title, layout in LAYOUTS.items():
        giver, taker = _side(num_blocks, KVLayout("hdt", "htd")), _side(num_blocks, layout)
        registry = InProcessConnector()
        makers = (ProcessGroupTransport, object_store_transport)
        server = TransferServer(giver, {one.name: one for one in (make(CPU) for make in makers)})
        remotes = {one.name: RemoteConnector([one], taker.kv) for one in (make(CPU) for make in makers)}
        ways: dict[str, tuple[str, Connector]] = {"in-process": (registry.serve(giver), registry)}
        ways |= {name: (server.address, remote) for name, remote in remotes.items()}
        for name, (address, connector) in ways.items():
            for size_mb in sizes_mb:
                blocks = max(1, size_mb * 2**20 // BLOCK_BYTES)
                _pull_s(giver, taker, address, connector, blocks)
                times = [_pull_s(giver, taker, address, connector, blocks) for _ in range(rounds)]
                median_s = statistics.median(times)
                rate = blocks * BLOCK_BYTES / median_s / 1e9
                print(f"| {name}, {title} | {size_mb} MB | {median_s * 1e3:.1f} ms | {rate:.2f} GB/s |")
        for remote in remotes.values():
            remote.close()
        server.close()


def _overlap(prompt_tokens: int, rounds: int, say: Callable[[str], None]) -> None:
    config = EngineConfig(
        model=str(prepare_default_model()), dtype="float32", max_model_len=1024, kv_cache_bytes=1 << 29, max_num_batched_tokens=128
    )
    for transfer in ("in-process", "process-group"):
        engine = DisaggregatedEngine.load(config, transfer)  # type: ignore[arg-type]
        for number in range(rounds):
            ids = tuple(13 + (7919 * (i + 1000 * number)) % 40_000 for i in range(prompt_tokens))
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            engine.add_request(GenerationRequest(request_id=f"{number}", prompt_ids=ids, params=params, seed=0))
            while engine.has_work:
                engine.step()
        counters = engine.decode.handoffs.counters  # type: ignore[union-attr]
        share = counters.overlap_s / counters.transfer_s
        say(
            f"| {transfer} | {prompt_tokens} tokens in chunks of 128 | {counters.num_bytes / rounds / 2**20:.1f} MB a handoff "
            f"| {counters.transfer_s / rounds * 1e3:.1f} ms | {share:.0%} of it before the prefill ended |"
        )
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(hardware_line(len(os.sched_getaffinity(0))))
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 29)
    _bandwidths(args.sizes_mb, args.rounds)
    ray.shutdown()
    _overlap(args.prompt_tokens, args.rounds, print)


if __name__ == "__main__":
    main()
