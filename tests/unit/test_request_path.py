"""A streamed chat through gateway, router and a real engine in one process: the files that it runs through are those that
ARCHITECTURE.md lists."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from transformers import AutoModelForCausalLM, LlamaConfig

from replicas.engine.loader import load_engine
from replicas.engine_config import EngineConfig
from replicas.text.tokenizer import Tokenizer
from tests.unit.in_process_cluster import CHAT, MODEL, client_of, running_cluster

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "router", "replicas", "kvcache")
MAX_HOPS = 55


def listed() -> tuple[list[str], list[str], set[str], set[str]]:
    """Hops in their order, those among them that only Serve runs, the files beside the path, and those that run when they please."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split("## A streamed chat, file by file\n")[1].split("\n## ")[0]
    hops = re.findall(r"^\d+\. \[(\S+)\]\(\1\)( \+)?:", section, re.MULTILINE)
    groups = {line: set(re.findall(r"\]\((\S+)\)", line)) for line in re.findall(r"^- .*$", section, re.MULTILINE)}
    meanwhile = set().union(*(files for line, files in groups.items() if line.startswith("- reports")))
    beside = set().union(*groups.values()) - meanwhile
    return [path for path, _ in hops], [path for path, is_shell in hops if is_shell], beside, meanwhile


class Tracer:
    """Files of the packages in which some function was called while `is_on`, on any thread that starts after `installed`."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: dict[str, None] = {}  # in the order of their first call

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = sys.getprofile()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if self.is_on and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and (name := path.relative_to(ROOT)).parts[0] in PACKAGES:
                self.files.setdefault(name.as_posix())


async def test_files_of_a_streamed_chat_are_those_of_the_architecture(
    default_tokenizer: Tokenizer, tmp_path: Path, same_torch_threads: None
) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=default_tokenizer.vocab_size,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = EngineConfig(
        model=str(tmp_path), dtype="float32", runner="native", kv_cache_bytes=1 << 20, max_num_batched_tokens=128, num_threads=1
    )
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello " * 20}], "max_tokens": 5, "stream": True}
    tracer = Tracer()
    with tracer.installed():
        async with running_cluster(default_tokenizer, make_engine=lambda: load_engine(settings)) as cluster, client_of(cluster) as client:  # type: ignore[arg-type, return-value]
            await client.post(CHAT, json=body)  # what is done once only is not on the path
            tracer.is_on = True
            answer = await client.post(CHAT, json=body)
            tracer.is_on = False
    assert answer.status_code == 200
    hops, shells, beside, meanwhile = listed()
    assert len(hops) <= MAX_HOPS
    assert set(shells) <= set(hops)
    expected = (set(hops) - set(shells)) | beside
    assert set(tracer.files) - expected - meanwhile == set(), "not on the page"
    assert expected - set(tracer.files) == set(), "on the page, but not on the way"
