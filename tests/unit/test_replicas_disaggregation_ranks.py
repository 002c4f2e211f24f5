"""Prefill and decode engines of one or several ranks each: the same tokens as one engine's, whatever a rank does in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.handoff import HandoffFailed
from kvcache.tensors import KVTensors
from kvcache.transfer.object_store import ObjectStoreTransport
from kvcache.transfer.source import KVSource
from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.handoff.wiring import InProcessWiring, RemoteWiring
from replicas.ranks import follower, follower_transfers
from replicas.ranks.follower_transfers import FollowerTransfers
from replicas.ranks.ranks import RankLost
from replicas.request import FinishReason
from replicas.sampling_params import SamplingParams
from tests.checked_pair import CheckedPair, RandomOperations
from tests.engine_harness import requests_for, run
from tests.memory_store import MemoryStore
from tests.rank_threads import ThreadLauncher
from tests.tiny_models import generated_by_transformers, save_tiny_model, tiny_prompts

NUM_OUTPUT = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("same_torch_threads")

Folder = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folder of a tiny model, and transformers' answers to the tiny prompts."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def model(name: str) -> tuple[Path, list[list[int]]]:
        if name not in made:
            folder = save_tiny_model(name, tmp_path_factory.mktemp(name))
            made[name] = folder, generated_by_transformers(folder, tiny_prompts(), NUM_OUTPUT)
        return made[name]

    return model


def _config(folder: Path, role: Any, size: int, runner: Any, kv_transfer: Any = "auto") -> EngineConfig:
    return EngineConfig(
        model=str(folder), dtype="float32", role=role, tensor_parallel_size=size, runner=runner, kv_cache_bytes=1 << 20, block_size=8,
        max_num_seqs=8, max_num_batched_tokens=13, max_model_len=96, num_threads=1, kv_transfer=kv_transfer,
    )  # fmt: skip


@contextmanager
def _pair(folder: Path, sizes: tuple[int, int], runners: tuple[str, str] = ("native", "native")) -> Iterator[CheckedPair]:
    wiring = RemoteWiring(threading.Event())
    prefill, decode = (
        load_engine(_config(folder, role, size, runner), wiring, ThreadLauncher())
        for role, size, runner in zip(("prefill", "decode"), sizes, runners, strict=True)
    )
    pair = CheckedPair(prefill, decode)
    yield pair
    pair.close()


@pytest.mark.parametrize(
    ("name", "sizes", "runners"),
    [
        ("llama", (2, 1), ("native", "native")),
        ("llama", (1, 2), ("native", "native")),
        ("llama", (2, 2), ("native", "native")),
        ("llama", (3, 2), ("native", "native")),  # 2 KV heads: two ranks share one
        ("llama", (2, 4), ("native", "native")),
        ("qwen3", (2, 1), ("native", "transformers")),  # layouts differ
        ("gpt2", (3, 2), ("transformers", "transformers")),  # 4 KV heads: two, one and one to two and two
        ("gemma2", (1, 2), ("transformers", "transformers")),
    ],
    ids=lambda value: "-to-".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_ranks_hand_over_to_ranks_and_answer_as_one_engine(
    model_of: Folder, name: str, sizes: tuple[int, int], runners: tuple[str, str]
) -> None:
    folder, expected = model_of(name)
    with _pair(folder, sizes, runners) as pair:
        counters = pair.decode.handoffs.counters
        num_bytes = []
        for state in ("cold", "hot"):
            results = run(pair, requests_for(tiny_prompts(), GREEDY, prefix=state))
            assert [result.token_ids for result in results] == expected
            num_bytes.append(counters.num_bytes - sum(num_bytes))
        assert (counters.num_loaded, counters.num_recomputed) == (2 * len(expected), 0)
        assert num_bytes[1] < num_bytes[0], "what the decode engine has cached moves on no rank"
        pair.assert_nothing_is_held()


def test_every_rank_takes_the_transport_that_is_injected_and_named(model_of: Folder) -> None:
    folder, expected = model_of("llama")
    store = MemoryStore()

    def make(device: torch.device) -> ObjectStoreTransport:
        return ObjectStoreTransport(store, device)

    wiring = RemoteWiring(threading.Event(), extra_transports=[make])
    prefill, decode = (
        load_engine(_config(folder, role, 2, "native", "object-store"), wiring, ThreadLauncher(make)) for role in ("prefill", "decode")
    )
    pair = CheckedPair(prefill, decode)
    assert [result.token_ids for result in run(pair, requests_for(tiny_prompts(), GREEDY))] == expected
    assert decode.handoffs.counters.num_loaded == len(expected)
    pair.close()
    assert store.num_puts >= 2 * len(expected), "both ranks of the source were meant to use it"
    assert store.objects == {}


def test_sampled_tokens_do_not_depend_on_the_ranks(model_of: Folder) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.4, max_tokens=NUM_OUTPUT, ignore_eos=True)
    answers = []
    for sizes in ((1, 1), (2, 3)):
        with _pair(model_of("llama")[0], sizes) as pair:
            answers.append([result.token_ids for result in run(pair, requests_for(tiny_prompts(), params))])
    assert answers[0] == answers[1]


def test_cancel_at_any_step_gives_every_block_back(model_of: Folder) -> None:
    with _pair(model_of("llama")[0], (2, 2)) as pair:
        for num_steps in range(8):
            requests = requests_for(tiny_prompts(), GREEDY, prefix=f"{num_steps}-")
            for request in requests:
                pair.add_request(request)
            ends = {item.key: item.finish_reason for _ in range(num_steps) for item in pair.step().progress if item.finish_reason}
            for request in requests:
                pair.cancel(request.key)
            while pair.has_work:
                ends |= {item.key: item.finish_reason for item in pair.step().progress}
                pair.check()
            assert set(ends.values()) <= {FinishReason.CANCELLED, FinishReason.LENGTH}
            assert len(ends) == len(requests)
            pair.assert_nothing_is_held()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=["2-to-2", "3-to-1"])
def test_no_rank_reads_or_writes_a_freed_block_under_random_operations(
    model_of: Folder, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[KVTensors] = []

    class Recorded(FollowerTransfers):
        def __init__(self, kv: KVTensors, *settings: Any, **named: Any) -> None:
            super().__init__(kv, *settings, **named)
            others.append(kv)

    monkeypatch.setattr(follower, "FollowerTransfers", Recorded)
    folder, expected = model_of("llama")
    with _pair(folder, sizes) as pair:
        num_others = sizes[0] - 1
        memories = [
            [pair.prefill.handoffs.source.kv, *others[:num_others]],
            [pair.decode.handoffs.source.kv, *others[num_others:]],
        ]
        assert [len(ranks) for ranks in memories] == list(sizes)
        operations = RandomOperations(pair, tiny_prompts(), expected, memories)
        operations.run(1_000, GREEDY)
        assert operations.num_whole > 40
        counters = pair.decode.handoffs.counters
        assert counters.num_loaded > 20
        assert counters.num_recomputed > 2
        pair.assert_nothing_is_held()


class RefusingSource(KVSource):
    """Gives what is computed early, and no more."""

    def read(self, ref: Any, form: Any, first: int, wait_s: float) -> Any:
        batch = super().read(ref, form, first, wait_s)
        if batch.is_computed:
            raise HandoffFailed("this rank refuses")
        return batch


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=["to-one-rank", "to-two-ranks"])
def test_rank_of_the_source_that_refuses_makes_the_decode_engine_compute(
    model_of: Folder, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follower_transfers, "KVSource", RefusingSource)
    folder, expected = model_of("llama")
    with _pair(folder, sizes) as pair:
        results = run(pair, requests_for(tiny_prompts(), GREEDY))
        assert [result.token_ids for result in results] == expected
        counters = pair.decode.handoffs.counters
        assert (counters.num_loaded, counters.num_recomputed) == (0, len(expected))
        assert "this rank refuses" in caplog.text
        for ref in pair.prefill.handoffs.ownership.refs():
            pair.prefill.handoffs.ownership.close(ref)
        while pair.has_work:
            pair.step()
        pair.assert_nothing_is_held()


def _step_for_ever(engine: Engine) -> None:
    while True:
        engine.step()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_lost_rank_ends_its_engine_in_mid_transfer_and_leaves_no_block_taken(model_of: Folder, side: str) -> None:
    with _pair(model_of("llama")[0], (2, 2)) as pair:
        engine = getattr(pair, side)
        (request,) = requests_for([tiny_prompts()[3]], GREEDY)
        pair.add_request(request)
        while not engine.handoffs.ownership.has_transfers:
            pair.step()
        engine._leader._ranks._channels[1].close()
        with pytest.raises(RankLost, match="rank 1 has died"):
            _step_for_ever(engine)
        pair.cancel(request.key)
        engine.close()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_ranks_are_refused_inside_one_process(model_of: Folder) -> None:
    with pytest.raises(ValueError, match="transfer 'in-process' needs tensor_parallel_size 1"):
        load_engine(_config(model_of("llama")[0], "prefill", 2, "native"), InProcessWiring(), ThreadLauncher())
