"""Engines that draft with weights: the same answers as without, and drafts that are right where the head knows the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from replicas.engine.engine import Engine
from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.sampling_params import SamplingParams
from replicas.speculation_config import SpeculationConfig
from tests.checked_pair import CheckedPair
from tests.engine_harness import Generated, requests_for, run
from tests.rank_threads import ThreadLauncher
from tests.scripted_proposer import eager_speculator
from tests.tiny_models import SIZES, save_tiny_model
from tests.unit.cyclic_models import NUM_IDS, NUM_LAYERS, next_id, write_eagle, write_medusa, write_target
from tests.unit.drafting_heads import random_tensors, write_head, write_tokenizer

pytestmark = pytest.mark.usefixtures("same_torch_threads")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=1.5, top_p=0.95, max_tokens=24, ignore_eos=True, presence_penalty=0.4, frequency_penalty=0.2, logprobs=2, min_tokens=4
)  # fmt: skip
PROMPTS = [[(7 * i + 3 * n) % 100 for i in range(n)] for n in (3, 18, 29)]


def engine_of(folder: Path, speculation: SpeculationConfig | None = None, **settings: object) -> Engine:
    """With `speculation`, an engine that verifies all drafts it can get, however often they are wrong."""
    chosen = {
        "model": str(folder), "dtype": "float32", "num_threads": 1, "max_model_len": 96, "block_size": 4, "max_num_batched_tokens": 16,
        "max_num_seqs": 4, "kv_cache_bytes": 4 << 20, **settings,
    }  # fmt: skip
    engine = load_engine(EngineConfig(**chosen, speculation=speculation or SpeculationConfig()))
    if speculation is not None:
        assert engine._speculator is not None
        engine._speculator = eager_speculator(engine.scheduler.drafts, *engine._speculator._proposers(), max_tokens=speculation.max_tokens)
    return engine


def acceptance(engine: Engine, method: str) -> tuple[int, int]:
    """Drafts and accepted drafts."""
    assert engine._speculator is not None
    stats = next(stats for stats in engine._speculator.statistics() if stats.method == method)
    return stats.num_drafted, stats.num_accepted


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("target"))
    write_tokenizer(folder, SIZES["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary that knows nothing of the target."""
    folder = save_tiny_model("llama-tied", tmp_path_factory.mktemp("another"))
    write_tokenizer(folder, SIZES["vocab_size"])
    return folder


def random_head(kind: str, folder: Path) -> str:
    size, vocab = SIZES["hidden_size"], SIZES["vocab_size"]
    if kind == "medusa":
        tensors = random_tensors({f"{head}.0.linear.{name}": shape for head in range(3) for name, shape in
                                  (("weight", (size, size)), ("bias", (size,)))})  # fmt: skip
        return write_head(folder, {"medusa_num_heads": 3, "medusa_num_layers": 1}, tensors, "medusa_lm_head.safetensors")
    config = {
        "hidden_size": size, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "rms_norm_eps": 1e-5,
        "num_hidden_layers": 1, "vocab_size": vocab,
    }  # fmt: skip
    is_eagle3 = kind == "eagle3"
    width, prefix = (2 * size, "midlayer") if is_eagle3 else (size, "layers.0")
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.self_attn.q_proj.weight": (size, width), f"{prefix}.self_attn.k_proj.weight": (size // 2, width),
        f"{prefix}.self_attn.v_proj.weight": (size // 2, width), f"{prefix}.self_attn.o_proj.weight": (size, size),
        f"{prefix}.mlp.gate_proj.weight": (40, size), f"{prefix}.mlp.up_proj.weight": (40, size),
        f"{prefix}.mlp.down_proj.weight": (size, 40), f"{prefix}.post_attention_layernorm.weight": (size,),
        "fc.weight": (size, (3 if is_eagle3 else 2) * size),
    }  # fmt: skip
    if is_eagle3:
        shapes |= {f"{prefix}.input_layernorm.weight": (size,), f"{prefix}.hidden_norm.weight": (size,), "norm.weight": (size,)}
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]  # type: ignore[assignment]
        config["draft_vocab_size"] = vocab
    return write_head(folder, config, random_tensors(shapes))


def speculation_of(method: str, tmp_path: Path, another: Path) -> SpeculationConfig:
    if method == "twin":
        return SpeculationConfig(method="twin", twin="int4", max_tokens=4)
    if method == "draft_model":
        return SpeculationConfig(method="draft_model", model=str(another), max_tokens=4)
    return SpeculationConfig(method="eagle" if "eagle" in method else "medusa", model=random_head(method, tmp_path / method), max_tokens=4)


METHODS = ("medusa", "eagle1", "eagle3", "draft_model", "twin")


def answers(engine: Engine, params: SamplingParams) -> list[Generated]:
    """Several requests together, then one that finds the second one's prompt in the cache."""
    together = run(engine, requests_for(PROMPTS, params, seeds=[5, 6, 7]))
    return [*together, *run(engine, requests_for([[*PROMPTS[1], 9, 8]], params, seeds=[8], prefix="again"))]


@pytest.fixture(scope="module")
def plain_answers(target: Path) -> Callable[[str, str], list[Generated]]:
    """The answers without speculation of a dtype, greedy or sampled."""
    known: dict[tuple[str, str], list[Generated]] = {}

    def answers_of(dtype: str, kind: str) -> list[Generated]:
        if (dtype, kind) not in known:
            known[dtype, kind] = answers(engine_of(target, dtype=dtype), GREEDY if kind == "greedy" else SAMPLED)
        return known[dtype, kind]

    return answers_of


def equal(found: list[Generated], expected: list[Generated]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.logprobs for one in found] == [one.logprobs for one in expected]


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_answers_equal_those_without_speculation_to_the_bit(
    method: str, dtype: str, kind: str, target: Path, another: Path, plain_answers: Callable[[str, str], list[Generated]], tmp_path: Path
) -> None:
    engine = engine_of(target, speculation_of(method, tmp_path, another), dtype=dtype)
    equal(answers(engine, GREEDY if kind == "greedy" else SAMPLED), plain_answers(dtype, kind))
    assert acceptance(engine, "eagle" if "eagle" in method else method)[0] > 20


@pytest.mark.parametrize("method", METHODS)
def test_answers_of_preempted_and_cancelled_requests_equal_those_without_speculation(
    method: str, target: Path, another: Path, tmp_path: Path
) -> None:
    found = []
    for speculation in (None, speculation_of(method, tmp_path, another)):
        engine = engine_of(target, speculation, kv_cache_bytes=(1 << 13) * (22 if method == "draft_model" and speculation else 15))
        for index, request in enumerate(requests_for(PROMPTS, SAMPLED, prefix="gone")):
            engine.add_request(request)
            engine.step()
            if index:
                engine.cancel(request.key)
        while engine.has_work:
            engine.step()
            engine.check()
        found.append(run(engine, requests_for(PROMPTS * 2, SAMPLED)))
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
    equal(found[1], found[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "eagle1", "eagle3", "draft_model"])
def test_answers_of_the_transformers_runner_equal_those_without_speculation(
    method: str, target: Path, another: Path, tmp_path: Path
) -> None:
    plain = answers(engine_of(target, runner="transformers"), SAMPLED)
    engine = engine_of(target, speculation_of(method, tmp_path, another), runner="transformers")
    for found, expected in zip(answers(engine, SAMPLED), plain, strict=True):
        # Log-probabilities differ in their last bits: torch sums rows of other shapes in another order.
        assert found.token_ids == expected.token_ids
    assert acceptance(engine, "eagle" if "eagle" in method else method)[0] > 20


# Drafts that must be right


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_target(tmp_path_factory.mktemp("cycle"))
    write_tokenizer(folder, NUM_IDS)
    return folder


HEADS: dict[str, Callable[[Path], SpeculationConfig]] = {
    "medusa": lambda folder: SpeculationConfig(method="medusa", model=write_medusa(folder), max_tokens=3),
    "eagle1": lambda folder: SpeculationConfig(method="eagle", model=write_eagle(folder, is_eagle3=False), max_tokens=3),
    "eagle3": lambda folder: SpeculationConfig(method="eagle", model=write_eagle(folder, is_eagle3=True), max_tokens=3),
}


def generated_on_the_cycle(engine: Engine) -> None:
    prompts = [[5, 9, 30], [11] * 21]
    for prompt, one in zip(prompts, run(engine, requests_for(prompts, GREEDY)), strict=True):
        assert one.token_ids == [next_id(prompt[-1], step) for step in range(1, 25)]


@pytest.mark.parametrize("runner", ["native", "transformers"])
@pytest.mark.parametrize("head", HEADS)
def test_every_draft_of_a_head_that_knows_the_model_is_accepted(head: str, runner: str, cycle: Path, tmp_path: Path) -> None:
    engine = engine_of(cycle, HEADS[head](tmp_path), runner=runner)
    generated_on_the_cycle(engine)
    num_drafted, num_accepted = acceptance(engine, "medusa" if head == "medusa" else "eagle")
    assert num_accepted == num_drafted >= 30


@pytest.mark.parametrize("read_layer", [1, 3])
def test_head_that_reads_a_neighbouring_layer_is_never_right(read_layer: int, cycle: Path, tmp_path: Path) -> None:
    """What an index that is off by one would cost: the head above, told that the same columns hold another layer."""
    source = write_eagle(tmp_path, is_eagle3=True, layer_ids=(1, 2, 3), read_layer=2)
    ids = {1: (0, 1, 2), 3: (2, 3, 4)}[read_layer]
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("[1, 2, 3]", str(list(ids))))
    engine = engine_of(cycle, SpeculationConfig(method="eagle", model=source, max_tokens=3))
    generated_on_the_cycle(engine)
    num_drafted, num_accepted = acceptance(engine, "eagle")
    assert num_accepted <= 0.1 * num_drafted


def test_draft_model_that_is_the_target_has_every_draft_accepted(cycle: Path) -> None:
    engine = engine_of(cycle, SpeculationConfig(method="draft_model", model=str(cycle), max_tokens=3))
    generated_on_the_cycle(engine)
    num_drafted, num_accepted = acceptance(engine, "draft_model")
    assert num_accepted == num_drafted >= 30


def test_method_auto_with_a_model_takes_the_method_of_its_files(cycle: Path, tmp_path: Path) -> None:
    for place, (head, write) in enumerate(HEADS.items()):
        engine = engine_of(cycle, replace(write(tmp_path / str(place)), method="auto"))
        assert [proposer.name for proposer in engine._speculator._proposers()][1:] == ["suffix", head.rstrip("13")]
    engine = engine_of(cycle, SpeculationConfig(method="auto", model=str(cycle)))
    assert [proposer.name for proposer in engine._speculator._proposers()][1:] == ["suffix", "draft_model"]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["medusa", "eagle3", "draft_model"])
def test_rank_0_of_a_divided_model_drafts_with_a_whole_head(head: str, cycle: Path, tmp_path: Path) -> None:
    speculation = (
        SpeculationConfig(method="draft_model", model=str(cycle), max_tokens=3) if head == "draft_model" else HEADS[head](tmp_path)
    )
    config = EngineConfig(
        model=str(cycle), dtype="float32", num_threads=2, block_size=4, kv_cache_bytes=4 << 20, max_model_len=96, max_num_batched_tokens=16,
        max_num_seqs=4, tensor_parallel_size=2, speculation=speculation,
    )  # fmt: skip
    engine = load_engine(config, launcher=ThreadLauncher())
    assert engine._speculator is not None
    engine._speculator = eager_speculator(engine.scheduler.drafts, *engine._speculator._proposers(), max_tokens=3)
    generated_on_the_cycle(engine)
    num_drafted, num_accepted = acceptance(engine, speculation.method)
    assert num_accepted == num_drafted >= 30
    engine.close()


@pytest.mark.parametrize("head", [*HEADS, "draft_model"])
def test_decode_engine_drafts_though_the_prompts_kv_came_from_another(head: str, cycle: Path, tmp_path: Path) -> None:
    speculation = (
        SpeculationConfig(method="draft_model", model=str(cycle), max_tokens=3) if head == "draft_model" else HEADS[head](tmp_path)
    )
    pair = CheckedPair.load(
        EngineConfig(
            model=str(cycle), dtype="float32", num_threads=1, block_size=4, kv_cache_bytes=4 << 20, max_model_len=96,
            max_num_batched_tokens=16, max_num_seqs=4, speculation=speculation,
        )
    )  # fmt: skip
    for engine in (pair.prefill, pair.decode):
        assert engine._speculator is not None
        engine._speculator = eager_speculator(engine.scheduler.drafts, *engine._speculator._proposers(), max_tokens=3)
    prompts = [[5, 9, 30], [11] * 21]
    for prompt, one in zip(prompts, run(pair, requests_for(prompts, GREEDY)), strict=True):
        assert one.token_ids == [next_id(prompt[-1], step) for step in range(1, 25)]
    num_drafted, num_accepted = acceptance(pair.decode, speculation.method)
    assert num_accepted == num_drafted >= 20
    pair.assert_nothing_is_held()
    pair.close()


# What cannot be served


def test_kv_of_a_drafter_is_part_of_the_budget(cycle: Path, tmp_path: Path) -> None:
    """Floats of a token: 4 layers x 3 heads x 16 x 2 of the target, 2 heads x 12 x 2 of the head; a draft model has the target's."""
    blocks = {}
    budget = 4 * 1536 * 4 * 30
    for name, speculation in (
        ("none", SpeculationConfig()),
        ("eagle", HEADS["eagle3"](tmp_path)),
        ("draft_model", SpeculationConfig(method="draft_model", model=str(cycle))),
    ):
        engine = load_engine(
            EngineConfig(model=str(cycle), dtype="float32", num_threads=1, block_size=4, kv_cache_bytes=budget, max_num_batched_tokens=64,
                         max_model_len=40, speculation=speculation)
        )  # fmt: skip
        blocks[name] = engine.stats().num_blocks
    per_token = 4 * NUM_LAYERS * 3 * 16 * 2
    assert blocks == {
        "none": budget // (4 * per_token),
        "eagle": budget // (4 * (per_token + 4 * 2 * 12 * 2)),
        "draft_model": budget // (8 * per_token),
    }


@pytest.mark.parametrize(
    ("settings", "speculation", "message"),
    [
        ({"runner": "transformers"}, SpeculationConfig(method="twin"), "'twin' needs the native runner"),
        ({"dtype": "bfloat16", "quantization": "int8"}, SpeculationConfig(method="twin", twin="int8"), "no faster than the target"),
        ({}, SpeculationConfig(method="medusa", model="/nowhere"), "the folder /nowhere does not exist"),
        ({}, SpeculationConfig(method="draft_model", model="/nowhere"), "model folder /nowhere does not exist"),
    ],
)
def test_method_that_cannot_be_served_is_rejected_with_one_line(
    settings: dict[str, object], speculation: SpeculationConfig, message: str, target: Path
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        engine_of(target, speculation, **settings)
    assert "\n" not in str(raised.value)


def test_draft_model_of_another_vocabulary_is_rejected(target: Path, tmp_path: Path) -> None:
    foreign = save_tiny_model("llama", tmp_path)
    words = Tokenizer(models.WordLevel({f"x{token_id}": token_id for token_id in range(128)}, unk_token="x0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(foreign)
    with pytest.raises(ValueError, match=r"the draft model has 0 of the target's 128 tokens"):
        engine_of(target, SpeculationConfig(method="draft_model", model=str(foreign)))
