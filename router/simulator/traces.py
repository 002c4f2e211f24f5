"""Requests to replay, from public trace formats."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from kvcache.hashing import BlockKey, CacheIdentity, block_keys

HASH_BLOCK_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace, with made-up tokens that share prefixes exactly as the trace says."""

    request_id: str
    arrival_s: float
    """From the start of the trace, at its own speed."""
    num_prompt_tokens: int
    num_output_tokens: int
    runs: tuple[int, ...]
    """The token that each run of `HASH_BLOCK_TOKENS` prompt tokens repeats; one token alone repeats to the end."""
    block_keys: tuple[BlockKey, ...]
    num_new_tokens: int
    """Prompt tokens that no earlier request of the trace had as a prefix: what an unbounded cache would still compute."""
    tenant: str = "default"
    priority: int = 0

    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's tokens, made anew by each call: a trace's prompts together would fill gigabytes."""
        return _expand(self.runs, self.num_prompt_tokens)


def read_trace(path: Path, block_size: int, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a Mooncake jsonl or an Azure csv file, in order of arrival.

    Raises ValueError naming the line that cannot be read, or the format that is not known.
    """
    if HASH_BLOCK_TOKENS % block_size:
        raise ValueError(f"block_size must divide {HASH_BLOCK_TOKENS}, got {block_size}")
    if path.suffix == ".jsonl":
        rows = _mooncake_rows(path, limit)
    elif path.suffix == ".csv":
        rows = _azure_rows(path, limit)
    else:
        raise ValueError(f"trace must be a Mooncake .jsonl or an Azure .csv file, got {path.name}")
    requests: list[TraceRequest] = []
    seen: set[BlockKey] = set()
    for number, (arrival_s, runs, num_prompt_tokens, num_output_tokens) in enumerate(rows):
        keys = block_keys(CacheIdentity(), _expand(runs, num_prompt_tokens), block_size)
        num_known = next((position for position, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
        requests.append(
            TraceRequest(
                request_id=f"{path.stem}-{number}",
                arrival_s=arrival_s,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=num_output_tokens,
                runs=runs,
                block_keys=tuple(keys),
                num_new_tokens=num_prompt_tokens - num_known * block_size,
            )
        )
    return requests


_Row = tuple[float, tuple[int, ...], int, int]
"""Arrival in seconds, runs, prompt tokens, output tokens."""


def _expand(runs: tuple[int, ...], length: int) -> tuple[int, ...]:
    if len(runs) == 1:
        return runs * length
    token_ids: list[int] = []
    for token in runs:
        token_ids += (token,) * HASH_BLOCK_TOKENS
    return tuple(token_ids[:length])


def _mooncake_rows(path: Path, limit: int | None) -> list[_Row]:
    """A block of hash id h becomes 512 tokens h, so two prompts agree exactly as far as their hash ids do.

    Only the last block of a prompt may be partial; it stays partial, so it is never shared.
    """
    rows: list[_Row] = []
    with path.open() as lines:
        for number, line in enumerate(islice(lines, limit), 1):
            try:
                row = json.loads(line)
                length, hash_ids = int(row["input_length"]), row["hash_ids"]
                if len(hash_ids) != -(-length // HASH_BLOCK_TOKENS):
                    raise ValueError(f"{len(hash_ids)} hash ids for {length} tokens")
                rows.append((row["timestamp"] / 1_000, tuple(hash_ids), length, max(1, int(row["output_length"]))))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path.name}, line {number}: no Mooncake request: {error}") from error
    return rows


def _azure_rows(path: Path, limit: int | None) -> list[_Row]:
    """The trace tells no content, so no two prompts share anything: each repeats a token of its own."""
    rows: list[_Row] = []
    first: datetime | None = None
    with path.open(newline="") as lines:
        for number, row in enumerate(islice(csv.DictReader(lines), limit), 1):
            try:
                # seven decimals; datetime takes six. The trace gives no time zone, and only differences matter.
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                first = first or at
                length = max(1, int(row["ContextTokens"]))
                rows.append(((at - first).total_seconds(), (number,), length, max(1, int(row["GeneratedTokens"]))))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path.name}, row {number}: no Azure request: {error}") from error
    return rows
