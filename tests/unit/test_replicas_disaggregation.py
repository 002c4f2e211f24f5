"""Prefill on one engine and decode on another: the same tokens as one engine's, whatever goes wrong between the two."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcache.block_pool import BlockPool
from kvcache.ownership import KVOwnership, TransferRef
from kvcache.transfer.link import LinkLost
from replicas.engine.async_engine import AsyncEngine
from replicas.engine.disaggregated import DisaggregatedEngine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.handoff.handoffs import Handoffs
from replicas.handoff.other_ranks import NoOtherRanks
from replicas.handoff.wiring import InProcessWiring
from replicas.llm import LLM
from replicas.request import FinishReason, GenerationRequest, RequestRejected
from replicas.sampling_params import SamplingParams
from replicas.scheduling.scheduler import Scheduler
from tests.checked_pair import CheckedPair, RandomOperations
from tests.engine_harness import Generated, requests_for, run
from tests.tiny_llama import VOCAB_SIZE, generated_by_transformers, save_tiny_llama, shared_prompts

NUM_PROMPTS, NUM_OUTPUT = 50, 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return shared_prompts(NUM_PROMPTS)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return generated_by_transformers(folder, prompts, NUM_OUTPUT)


def _config(folder: Path, runner: Any = "native", **settings: Any) -> EngineConfig:
    chosen: dict[str, Any] = {"max_num_batched_tokens": 64, "kv_cache_bytes": 1 << 23, "max_num_seqs": 64, "block_size": 8, **settings}
    backend = "reference" if runner == "transformers" else "auto"  # the one whose layout is not the native one
    return EngineConfig(
        model=str(folder), dtype="float32", runner=runner, attention_backend=backend, max_model_len=128, num_threads=1, **chosen
    )


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[CheckedPair]:
    engine = CheckedPair.load(_config(folder))
    yield engine
    engine.close()


def _restarted(pair: CheckedPair, num_blocks: int | None = None, *, lease_s: float = 30.0, caching: bool = True) -> CheckedPair:
    """The same models and memory with nothing cached and nobody waiting."""
    for engine in (pair.prefill, pair.decode):
        assert not engine.has_work
        old, handoffs = engine.scheduler, engine.handoffs
        pool = BlockPool(num_blocks or old.pool.num_blocks, old.pool.block_size)
        config = replace(old.config, max_model_len=min(128, pool.num_blocks * pool.block_size), enable_prefix_caching=caching)
        engine.scheduler = Scheduler(config, pool)
        source = handoffs.source
        before = source.transfers
        source.transfers = KVOwnership(pool=pool, epoch=before.epoch + 1, lease_s=lease_s, clock=before.clock)
        engine.handoffs = Handoffs(
            scheduler=engine.scheduler, ownership=source.transfers, source=source, connector=handoffs._connector,
            address=handoffs._share.address, kv_heads=range(handoffs._share.end), fingerprint=engine.description.fingerprint,
            ranks=NoOtherRanks(), changed=handoffs.changed,
        )  # fmt: skip
    return pair


def _tokens(results: list[Generated]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("runners", [("native", "native"), ("native", "transformers"), ("transformers", "native")], ids="-to-".join)
@pytest.mark.parametrize("transfer", ["in-process", "process-group"])
def test_fifty_prompts_cold_and_hot_equal_transformers(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], transfer: Any, runners: tuple[str, str]
) -> None:
    engine = CheckedPair.load(_config(folder, runners[0]), transfer, _config(folder, runners[1]))
    layouts = [e.handoffs.source.kv.layout.id for e in (engine.prefill, engine.decode)]
    assert (layouts[0] == layouts[1]) == (runners[0] == runners[1]), "the layouts were meant to be mixed"
    for state in ("cold", "hot"):
        results = run(engine, requests_for(prompts, GREEDY, prefix=state))
        assert _tokens(results) == expected
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
    assert engine.decode.handoffs.counters.num_loaded == 2 * NUM_PROMPTS
    assert engine.decode.handoffs.counters.num_recomputed == 0
    assert all(result.num_cached_tokens >= len(p) - 8 for result, p in zip(results, prompts, strict=True))
    engine.assert_nothing_is_held()
    engine.close()


def test_hot_decode_engine_pulls_only_what_it_lacks(pair: CheckedPair, prompts: list[list[int]]) -> None:
    pair = _restarted(pair)
    run(pair, requests_for(prompts[:1], GREEDY, prefix="cold"))
    cold_bytes = pair.decode.handoffs.counters.num_bytes
    cold_stats = pair.decode.stats()
    run(pair, requests_for(prompts[:1], GREEDY, prefix="hot"))
    assert pair.decode.handoffs.counters.num_bytes - cold_bytes <= cold_bytes // 10
    transferred = cold_stats.handoffs
    assert (transferred.num_loads, transferred.num_bytes, transferred.num_recomputes) == (1, cold_bytes, 0)
    assert cold_stats.transfer_tokens_per_s == pytest.approx(len(prompts[0]) / transferred.transfer_s)
    given = pair.prefill.stats().handoffs
    assert (given.num_offers, given.num_leases, given.num_loads) == (2, 0, 0)


def test_sampled_tokens_and_logprobs_equal_those_of_one_engine(pair: CheckedPair, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.4, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=2)
    pair = _restarted(pair)
    alone = run(pair.prefill, requests_for(prompts[:8], params))
    both = run(_restarted(pair), requests_for(prompts[:8], params))
    assert _tokens(both) == _tokens(alone)
    assert [[lp.token_id for lp in result.logprobs] for result in both] == _tokens(both)


def test_answer_of_one_token_needs_no_decode_engine(pair: CheckedPair, prompts: list[list[int]], expected: list[list[int]]) -> None:
    pair = _restarted(pair)
    results = run(pair, requests_for(prompts[:3], replace(GREEDY, max_tokens=1)))
    assert _tokens(results) == [tokens[:1] for tokens in expected[:3]]
    assert pair.decode.handoffs.counters.num_loaded == 0
    pair.assert_nothing_is_held()


def test_stop_token_as_first_token_ends_the_answer(pair: CheckedPair, prompts: list[list[int]], expected: list[list[int]]) -> None:
    pair = _restarted(pair)
    params = replace(GREEDY, stop_token_ids=(expected[0][0],))
    (result,) = run(pair, requests_for(prompts[:1], params))
    assert (result.token_ids, result.finish_reason) == (expected[0][:1], FinishReason.STOP)
    pair.assert_nothing_is_held()


def test_prefill_role_ends_with_its_first_token_and_an_offer(
    pair: CheckedPair, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = _restarted(pair)
    (request,) = requests_for(prompts[:1], GREEDY)
    pair.prefill.add_request(replace(request, wants_handoff=True))
    seen = [item for _ in range(4) for item in pair.prefill.step(may_wait=False).progress]
    assert seen[0].handoff is not None, "the offer comes with the first chunk"
    assert sum(item.handoff is not None for item in seen) == 1
    assert (seen[-1].token_ids, seen[-1].finish_reason) == ((expected[0][0],), FinishReason.HANDOFF)
    # The decode engine is told later, of the first token too: the answer goes on behind it.
    pair.decode.add_request(replace(request, handoff=seen[0].handoff, output_ids=seen[-1].token_ids))
    rest = []
    while pair.decode.has_work:
        rest += [token for item in pair.decode.step().progress for token in item.token_ids]
        pair.decode.check()
    assert rest == expected[0][1:]
    assert pair.decode.handoffs.counters.num_loaded == 1
    assert pair.prefill.handoffs.ownership.collect()


@pytest.mark.parametrize("change", ["fingerprint", "dtype", "block_size", "tokens_digest", "num_tokens", "epoch", "lease", "address"])
def test_handoff_that_cannot_be_had_is_computed_here(
    pair: CheckedPair, prompts: list[list[int]], expected: list[list[int]], change: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = _restarted(pair)
    (request,) = requests_for(prompts[:1], GREEDY)
    pair.prefill.add_request(replace(request, wants_handoff=True))
    (offer,) = [item.handoff for item in pair.prefill.step().progress if item.handoff is not None]
    wrong = {
        "fingerprint": "another", "dtype": "bfloat16", "block_size": 99, "tokens_digest": "another", "num_tokens": 9999,
        "epoch": offer.epoch - 1, "lease": 77, "address": "",
    }  # fmt: skip
    if change == "address":
        offer = replace(offer, shares=(replace(offer.shares[0], address="in-process://gone"),))
    else:
        offer = replace(offer, **{change: wrong[change]})
    (result,) = run(pair.decode, [replace(request, handoff=offer)])
    assert result.token_ids == expected[0]
    assert pair.decode.handoffs.counters.num_recomputed == 1
    assert "its KV is computed here" in caplog.text
    pair.prefill.cancel(request.key)
    pair.prefill.step()
    pair.prefill.step()
    pair.assert_nothing_is_held()


def test_link_that_breaks_in_mid_transfer_is_recomputed(
    pair: CheckedPair, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _restarted(pair, lease_s=0.2)
    source = pair.prefill.handoffs.source
    read = source.read
    monkeypatch.setattr(type(source), "read", lambda self, ref, form, first, wait_s: _break_after(self, read, ref, form, first, wait_s))
    results = run(pair, requests_for(prompts[:6], GREEDY))
    assert _tokens(results) == expected[:6]
    assert pair.decode.handoffs.counters.num_recomputed == 6
    pair.assert_nothing_is_held()
    assert pair.prefill.handoffs.ownership.counters.num_opened == 6


def _break_after(source: Any, read: Any, ref: TransferRef, form: Any, first: int, wait_s: float) -> Any:
    """Gives one batch that is complete but for its end, then the link is gone."""
    if first > 0 or source.counters.num_bytes:
        raise LinkLost("the cable was pulled")
    return read(ref, form, first, wait_s)


def test_prefill_engine_that_fails_a_step_leaves_all_to_the_decode_engine(
    pair: CheckedPair, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _restarted(pair)
    monkeypatch.setattr(pair.prefill._runner, "forward", lambda step: (_ for _ in ()).throw(RuntimeError("a kernel failed")))
    monkeypatch.setattr("replicas.engine.engine.MAX_FAILED_STEPS", 1_000)
    monkeypatch.setattr(pair.prefill, "_num_failed_steps", 0)  # put back afterwards: the engine serves the next tests
    assert _tokens(run(pair, requests_for(prompts[:4], GREEDY))) == expected[:4]
    pair.assert_nothing_is_held()


def test_first_token_that_differs_is_computed_again_behind_the_one_that_is_out(
    pair: CheckedPair, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a recompute in bfloat16 may give: here the message with the first token is changed on its way."""
    pair = _restarted(pair)
    source = pair.prefill.handoffs.source
    complete = source.complete
    monkeypatch.setattr(source, "complete", lambda ref, token_ids: complete(ref, ((token_ids[0] + 1) % VOCAB_SIZE,)))
    params = replace(GREEDY, logprobs=0)
    results = run(pair, requests_for(prompts[:6], params))
    assert _tokens(results) == expected[:6]
    assert [[lp.token_id for lp in result.logprobs] for result in results] == expected[:6]
    pair.assert_nothing_is_held()


def test_preempted_prefills_and_loads_still_give_the_same_tokens(
    pair: CheckedPair, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Too few blocks for all, and urgent requests that come later."""
    pair = _restarted(pair, num_blocks=40)
    requests = [replace(request, priority=-i) for i, request in enumerate(requests_for(prompts[:12], GREEDY))]
    results = run(pair, requests)
    assert _tokens(results) == expected[:12]
    pair.assert_nothing_is_held()


def test_cancel_at_any_step_gives_every_block_back(pair: CheckedPair, prompts: list[list[int]]) -> None:
    for num_steps in range(12):
        pair = _restarted(pair)
        requests = requests_for(prompts[:4], GREEDY)
        for request in requests:
            pair.add_request(request)
        ends = {}
        for _ in range(num_steps):
            ends |= {item.key: item.finish_reason for item in pair.step().progress if item.finish_reason}
        for request in requests:
            pair.cancel(request.key)
        while pair.has_work:
            for item in pair.step().progress:
                assert item.key not in ends
                ends[item.key] = item.finish_reason
            pair.check()
        assert len(ends) == 4
        pair.assert_nothing_is_held()


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_no_request_reads_a_freed_block_under_random_operations(
    pair: CheckedPair, prompts: list[list[int]], expected: list[list[int]], caching: bool
) -> None:
    """5,000 operations each: adds, cancels, expiries of either side and steps, with every freed block full of NaN."""
    pair = _restarted(pair, num_blocks=36, caching=caching)
    operations = RandomOperations(pair, prompts[:12], expected, [[e.handoffs.source.kv] for e in (pair.prefill, pair.decode)])
    operations.run(5_000, GREEDY)
    assert operations.num_whole > 200
    assert pair.decode.handoffs.counters.num_loaded > 100
    assert pair.decode.handoffs.counters.num_recomputed > 10
    pair.assert_nothing_is_held()


def test_unified_engine_refuses_to_hand_over_by_name(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = load_engine(_config(folder))
    (request,) = requests_for(prompts[:1], GREEDY)
    with pytest.raises(RequestRejected, match="its role is unified"):
        engine.add_request(replace(request, wants_handoff=True))
    (result,) = run(engine, [request])
    assert result.token_ids == expected[0]
    engine.close()


def test_llm_in_mode_disaggregated_equals_unified(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], default_tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match="mode must be unified or disaggregated"):
        LLM(str(folder), mode="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="decode_settings are for mode 'disaggregated'"):
        LLM(str(folder), decode_settings={"tensor_parallel_size": 2})
    with pytest.raises(ValueError, match="LLM has no setting ranks; allowed are"):
        LLM(str(folder), mode="disaggregated", decode_settings={"ranks": 2})
    with pytest.raises(ValueError, match="kv_transfer must be one of auto, process-group, object-store, got 'pigeons'"):
        LLM(str(folder), mode="disaggregated", kv_transfer="pigeons")
    with pytest.raises(ValueError, match="transfer must be one of auto, in-process, process-group"):
        DisaggregatedEngine.load(_config(folder), "pigeons")  # type: ignore[arg-type]
    engine = DisaggregatedEngine.load(_config(folder))
    with LLM.from_engine(engine, default_tokenizer) as llm:
        outputs = llm.generate(prompts[:5], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected[:5]


async def test_roles_on_threads_of_their_own_hand_over_and_stay_healthy(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    wiring = InProcessWiring()
    prefill = AsyncEngine(lambda: load_engine(_config(folder, role="prefill"), wiring))
    decode = AsyncEngine(lambda: load_engine(_config(folder, role="decode"), wiring))
    await prefill.start()
    await decode.start()

    async def answer(request: GenerationRequest) -> list[int]:
        first = [progress async for progress in prefill.generate(replace(request, wants_handoff=True))]
        (handoff,) = [progress.handoff for progress in first if progress.handoff is not None]
        tokens = [token for progress in first for token in progress.token_ids]
        assert first[-1].finish_reason is FinishReason.HANDOFF
        rest = [progress async for progress in decode.generate(replace(request, handoff=handoff, output_ids=tuple(tokens)))]
        return tokens + [token for progress in rest for token in progress.token_ids]

    requests = requests_for(prompts[:6], GREEDY)
    assert list(await asyncio.gather(*map(answer, requests))) == expected[:6]
    prefill.check_health()
    decode.check_health()
    await decode.shutdown()
    await prefill.shutdown()
