from __future__ import annotations

from pathlib import Path

import pytest

from router.simulator.synthesize import main, write_trace
from router.simulator.trace_shapes import SHAPES
from router.simulator.trace_synthesis import MadeRequest, synthesize
from router.simulator.traces import read_trace


@pytest.mark.parametrize(("kind", "name"), [("synthetic", "made.jsonl"), ("azure-code", "made.csv")])
def test_written_trace_is_read_as_it_was_made(tmp_path: Path, kind: str, name: str) -> None:
    assert main(["--kind", kind, "--requests", "80", "--seed", "9", "--output", str(tmp_path / "new" / name)]) == 0
    made = list(synthesize(SHAPES[kind], 80, seed=9))
    read = read_trace(tmp_path / "new" / name, 512)
    assert [(request.num_prompt_tokens, request.num_output_tokens) for request in read] == [
        (request.num_prompt_tokens, request.num_output_tokens) for request in made
    ]
    # both formats are written to the millisecond or finer
    assert [request.arrival_s for request in read] == pytest.approx([request.arrival_s for request in made], abs=1e-3)


def test_prefixes_survive_the_file(tmp_path: Path) -> None:
    trace = tmp_path / "made.jsonl"
    requests = [
        MadeRequest(arrival_s=0.0, num_prompt_tokens=1_200, num_output_tokens=3, hash_ids=(0, 1, 2)),
        MadeRequest(arrival_s=0.5, num_prompt_tokens=1_600, num_output_tokens=4, hash_ids=(0, 1, 3, 4)),
    ]
    write_trace(trace, requests)
    assert trace.read_text() == (
        '{"timestamp": 0, "input_length": 1200, "output_length": 3, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 500, "input_length": 1600, "output_length": 4, "hash_ids": [0, 1, 3, 4]}\n'
    )
    first, second = read_trace(trace, 512)
    assert (first.num_new_tokens, second.num_new_tokens) == (1_200, 1_600 - 2 * 512)


def test_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(2)]
    for file in files:
        assert main(["--requests", "300", "--seed", "2", "--output", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_bad_value_is_one_line_and_status_2_and_leaves_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "made.jsonl"
    assert main(["--requests", "0", "--output", str(file)]) == 2
    assert main(["--output", str(tmp_path / "made.txt")]) == 2
    assert caplog.messages == ["requests must be at least 1, got 0", "output must be a Mooncake .jsonl or an Azure .csv file, got made.txt"]
    assert list(tmp_path.iterdir()) == []
