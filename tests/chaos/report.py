"""Writes the rounds of a chaos run as a table and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from tests.bench.machine import hardware_line
from tests.chaos.scenarios import Round


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] if ordered else 0.0


def table(rounds: Sequence[Round]) -> str:
    lines = [
        "| scenario | rounds | streams | broken or different | pause p50 | p99 | longest | notes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(each.scenario for each in rounds):
        mine = [each for each in rounds if each.scenario == name]
        pauses = [pause for each in mine for pause in each.pauses_s]
        num_faults = sum(len(each.faults) for each in mine)
        notes = {key: max(each.notes[key] for each in mine if key in each.notes) for each in mine for key in each.notes}
        lost = sum(each.num_broken_as_expected for each in mine)
        texts = [f"{key} {value:g} at most" for key, value in notes.items()] + ([f"{lost} broke with their gateway"] if lost else [])
        lines.append(
            f"| {name} | {len(mine)} | {sum(each.num_streams for each in mine)} | {num_faults} | {median(pauses) if pauses else 0:.2f} s "
            f"| {percentile(pauses, 0.99):.2f} s | {max(pauses, default=0):.2f} s | {'; '.join(texts)} |"
        )
    return "\n".join(lines)


def write(rounds: Sequence[Round], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"machine": hardware_line(os.cpu_count() or 1), "rounds": [asdict(each) for each in rounds]}
    path.write_text(json.dumps(body, indent=1))
