"""How many KV blocks fit into memory, and the longest request that they allow. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

CPU_MEMORY_SHARE = 0.3
MIN_LOWERED_LEN = 256
"""An automatic `max_model_len` is never lowered below this: the server would refuse nearly every prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSize:
    """The pool's size, with the reason for the log."""

    num_blocks: int
    max_model_len: int
    reason: str


def size_kv(
    *,
    budget_bytes: int,
    budget_reason: str,
    bytes_per_token: int,
    block_size: int,
    wanted_len: int | None,
    max_positions: int | None,
    max_num_seqs: int,
) -> KVSize:
    """Fits `max_model_len` and the pool into `budget_bytes`.

    `wanted_len` is the user's `max_model_len`, `max_positions` the model's limit (None when it has none). The pool never has more
    blocks than `max_num_seqs` requests of full length can use. Raises ValueError when the wanted length does not fit.
    """
    if wanted_len is not None and max_positions is not None and wanted_len > max_positions:
        raise ValueError(f"max_model_len is {wanted_len}, but the model has positions for {max_positions} tokens; lower it")
    bytes_per_block = bytes_per_token * block_size
    fitting = budget_bytes // bytes_per_block
    if fitting < 2:
        raise ValueError(
            f"{budget_bytes} bytes for the KV cache ({budget_reason}) hold fewer than 2 blocks of {bytes_per_block} bytes; "
            f"raise kv_cache_bytes or free memory"
        )
    fitting_tokens = fitting * block_size
    max_len = wanted_len or max_positions or fitting_tokens
    reason = budget_reason
    if max_len > fitting_tokens:
        if wanted_len is not None:
            raise ValueError(
                f"max_model_len {wanted_len} needs {wanted_len * bytes_per_token} bytes of KV, but the budget is {budget_bytes} "
                f"({budget_reason}); raise kv_cache_bytes or lower max_model_len to {fitting_tokens}"
            )
        if fitting_tokens < MIN_LOWERED_LEN:
            raise ValueError(
                f"{budget_bytes} bytes for the KV cache ({budget_reason}) hold only {fitting_tokens} tokens; raise kv_cache_bytes to at "
                f"least {MIN_LOWERED_LEN * bytes_per_token}, or set max_model_len if requests may be so short"
            )
        max_len = fitting_tokens
        reason += f"; max_model_len lowered to {max_len} to fit"
    useful = max_num_seqs * -(-max_len // block_size)
    if useful < fitting:
        reason += f"; no more than max_num_seqs {max_num_seqs} full-length requests can use"
    return KVSize(num_blocks=min(fitting, useful), max_model_len=max_len, reason=reason)


def cpu_budget_bytes(kv_cache_bytes: int | None, num_sharing: int = 1) -> tuple[int, str]:
    """Bytes for KV on a CPU, and the reason. Free memory is divided by the `num_sharing` processes that start together."""
    if kv_cache_bytes is not None:
        return kv_cache_bytes, "kv_cache_bytes"
    available = min(psutil.virtual_memory().available, _cgroup_available_bytes())
    reason = f"{CPU_MEMORY_SHARE:.0%} of {available / 2**30:.1f} GiB available"
    return int(available * CPU_MEMORY_SHARE) // num_sharing, reason if num_sharing == 1 else f"1/{num_sharing} of {reason}"


def _cgroup_available_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes left under the container's memory limit; a very large number without a limit."""
    limit, used = root / "memory.max", root / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        return max(int(text) - int(used.read_text()), 0)
    return 2**62
