"""One step as bytes, for the ranks that do not schedule. Only numbers, nothing pickled.

The format is a header of six int32 (tokens, requests, block ids, rows of logits, block size, format), then int32 arrays: token
ids, the requests' token counts and context lengths, their block ids one after the other, and the rows whose logits are wanted.
Positions, slots and offsets follow from these.
"""

from __future__ import annotations

import struct

import numpy as np

from replicas.scheduling.step_arrays import StepArrays

FORMAT = 1
_HEADER = struct.Struct("<6i")
_INT = np.dtype("<i4")


def encode_step(step: StepArrays) -> bytes:
    blocks = step.block_ids()
    header = _HEADER.pack(len(step.token_ids_T), len(step.lens_R), len(blocks), len(step.logit_rows_N), step.block_size, FORMAT)
    arrays = (step.token_ids_T, step.lens_R, step.context_lens_R, blocks, step.logit_rows_N)
    return b"".join((header, *(array.astype(_INT, copy=False).tobytes() for array in arrays)))


def decode_step(message: bytes) -> StepArrays:
    """Raises ValueError for a message that this version did not write."""
    num_tokens, num_requests, num_blocks, num_rows, block_size, version = _HEADER.unpack_from(message)
    counts = (num_tokens, num_requests, num_requests, num_blocks, num_rows)
    if version != FORMAT or len(message) != _HEADER.size + 4 * sum(counts):
        raise ValueError(f"a step message of {len(message)} bytes in format {version} is not of this version")
    ends = np.cumsum(counts)
    numbers = np.frombuffer(message, _INT, offset=_HEADER.size).copy()  # torch needs writable memory
    token_ids_T, lens_R, context_lens_R, blocks, logit_rows_N, _ = np.split(numbers, ends)
    return StepArrays.with_blocks(
        token_ids_T=token_ids_T,
        lens_R=lens_R,
        context_lens_R=context_lens_R,
        blocks=blocks,
        logit_rows_N=logit_rows_N,
        block_size=block_size,
    )
