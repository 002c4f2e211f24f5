"""`python -m router.simulator.synthesize`: writes a trace with the published statistics of a public one, for `router.simulator`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

from router.simulator.trace_shapes import SHAPES
from router.simulator.trace_synthesis import MadeRequest, synthesize

logger = logging.getLogger("router.simulator.synthesize")

_AZURE_START = datetime(2023, 11, 16, tzinfo=UTC)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; user errors are one line on stderr."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        requests = synthesize(
            SHAPES[options.kind], options.requests, seed=options.seed, rate_per_s=options.rate, prefix_share=options.prefix_share
        )
        write_trace(options.output, requests)
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 2
    logger.info("wrote %s: %d requests like the %s trace", options.output, options.requests, options.kind)
    return 0


def write_trace(path: Path, requests: Iterable[MadeRequest]) -> None:
    """Writes a trace for `router.simulator.traces.read_trace`: a .jsonl file in Mooncake's format, a .csv file in Azure's, which has no
    prefixes. Raises ValueError for another suffix.
    """
    if path.suffix == ".jsonl":
        lines = map(_mooncake_line, requests)
    elif path.suffix == ".csv":
        lines = map(_azure_line, requests)
    else:
        raise ValueError(f"output must be a Mooncake .jsonl or an Azure .csv file, got {path.name}")
    first = list(islice(lines, 1))  # bad arguments are found before the file is touched
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        if path.suffix == ".csv":
            file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        file.writelines(first)
        file.writelines(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m router.simulator.synthesize", description=__doc__)
    parser.add_argument("--kind", choices=SHAPES, default="conversation", help="the public trace to imitate")
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--rate", type=float, help="mean requests/s; default: as in the public trace")
    parser.add_argument("--prefix-share", type=float, help="share of prompt blocks seen before; default: as in the public trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="a Mooncake .jsonl file, or an Azure .csv without prefixes")
    return parser


def _mooncake_line(request: MadeRequest) -> str:
    row = {
        "timestamp": round(request.arrival_s * 1_000),
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": request.hash_ids,
    }
    return json.dumps(row) + "\n"


def _azure_line(request: MadeRequest) -> str:
    at = _AZURE_START + timedelta(seconds=request.arrival_s)
    return f"{at:%Y-%m-%d %H:%M:%S.%f},{request.num_prompt_tokens},{request.num_output_tokens}\n"


if __name__ == "__main__":
    raise SystemExit(main())
