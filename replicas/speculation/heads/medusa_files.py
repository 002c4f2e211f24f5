"""Reads Medusa heads (arXiv 2401.10774) in the layouts of FasterDecoding/Medusa and of vLLM. Letters: H hidden size, V vocabulary,
C rows of a head's output layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replicas.speculation.heads.exactness import inexact_option
from replicas.speculation.heads.head_files import BadHead, HeadFiles

_PREFIXES = {"medusa_head.": "", "medusa_heads.": ""}
_NUMERIC = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?weight")
_VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaBlock:
    """x + SiLU(W x + b)."""

    weight_HH: Tensor
    bias_H: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaWeights:
    """Head i predicts the token i + 2 places behind the one whose final hidden state it reads."""

    blocks: tuple[tuple[MedusaBlock, ...], ...]  # of each head, in order
    output_CH: tuple[Tensor, ...] | None
    """The output layer of each head, or one for all; None takes the target's."""
    token_ids_C: Tensor | None
    """Token id of each row of the output layers, ascending; None if row i is token i."""


def is_medusa(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


def read_medusa(source: str, *, hidden_size: int, vocab_size: int) -> MedusaWeights:
    """Raises BadHead if the files do not fit a target of these sizes, or ask for something that would change its output."""
    files = HeadFiles.read(source, _PREFIXES)
    if (option := inexact_option(files.config)) is not None:
        raise BadHead(f"{source}: {option} accepts tokens that the target would not draw; only exact verification is served")
    stated = files.config.get("hidden_size", hidden_size)
    if stated != hidden_size:
        raise BadHead(f"{source} was made for a hidden size of {stated}; the target's is {hidden_size}")
    if files.config.get("vocab_size", vocab_size) != vocab_size:
        raise BadHead(f"{source} was made for {files.config['vocab_size']} token ids; the target has {vocab_size}")
    names = files.names()
    if any(_VLLM.fullmatch(name) for name in names):
        found = _read_vllm(files, hidden_size, vocab_size)
    elif any(_NUMERIC.fullmatch(name) for name in names):
        found = _read_numeric(files, hidden_size, vocab_size)
    else:
        raise BadHead(f"{source} has no Medusa heads: no tensor is named 0.0.linear.weight or blocks.0.layers.0.weight")
    files.finish()
    return found


def _read_numeric(files: HeadFiles, hidden_size: int, vocab_size: int) -> MedusaWeights:
    """`i.j.linear.weight` and `.bias`, then `i.L.weight`; the trainer's version 2 stores no output layers."""
    num_heads = _count(files, ("medusa_num_heads", "num_heads"), _NUMERIC, 1)
    num_layers = 0
    while f"0.{num_layers}.linear.weight" in files:
        num_layers += 1
    stated = files.config.get("medusa_num_layers", num_layers)
    if stated != num_layers or num_layers == 0:
        raise BadHead(f"{files.source}: medusa_num_layers is {stated}, but head 0 has {num_layers} layers (0.<layer>.linear.weight)")
    blocks = tuple(
        tuple(_block(files, f"{head}.{layer}.linear", hidden_size, needs_bias=True) for layer in range(num_layers))
        for head in range(num_heads)
    )
    outputs = None
    if f"0.{num_layers}.weight" in files:
        outputs = tuple(files.take(f"{head}.{num_layers}.weight", vocab_size, hidden_size) for head in range(num_heads))
    return MedusaWeights(blocks=blocks, output_CH=outputs, token_ids_C=None)


def _read_vllm(files: HeadFiles, hidden_size: int, vocab_size: int) -> MedusaWeights:
    """`blocks.i.layers.j.weight` with an optional `.bias`; `lm_heads.i.weight` or one `lm_head.weight`; an optional `token_map`."""
    num_heads = _count(files, ("num_heads",), _VLLM, 1)
    num_layers = _count(files, ("num_hidden_layers",), _VLLM, 2)
    blocks = tuple(
        tuple(_block(files, f"blocks.{head}.layers.{layer}", hidden_size) for layer in range(num_layers)) for head in range(num_heads)
    )
    token_ids_C = None
    num_rows = vocab_size
    if "token_map" in files:
        num_rows = int(files.config.get("truncated_vocab_size") or vocab_size)
        token_ids_C = _checked_map(files.take("token_map", num_rows), files.source, vocab_size)
    outputs: tuple[Tensor, ...] | None = None
    if files.config.get("original_lm_head"):
        name = "lm_head.weight" if "lm_head.weight" in files else "lm_heads.0.weight"
        outputs = (_output(files, name, token_ids_C, hidden_size, vocab_size),)
        files.drop(*(f"lm_heads.{head}.weight" for head in range(num_heads)))  # copies of the one
    elif "lm_heads.0.weight" in files:
        outputs = tuple(_output(files, f"lm_heads.{head}.weight", token_ids_C, hidden_size, vocab_size) for head in range(num_heads))
    if token_ids_C is not None:
        order_C = token_ids_C.argsort()
        token_ids_C = token_ids_C[order_C]
        outputs = None if outputs is None else tuple(output_CH[order_C] for output_CH in outputs)
    return MedusaWeights(blocks=blocks, output_CH=outputs, token_ids_C=token_ids_C)


def _block(files: HeadFiles, name: str, hidden_size: int, *, needs_bias: bool = False) -> MedusaBlock:
    take_bias = files.take if needs_bias else files.try_take
    return MedusaBlock(
        weight_HH=files.take(f"{name}.weight", hidden_size, hidden_size),
        bias_H=take_bias(f"{name}.bias", hidden_size),
    )


def _output(files: HeadFiles, name: str, token_ids_C: Tensor | None, hidden_size: int, vocab_size: int) -> Tensor:
    """An output layer with one row for each token of the map; some files store all rows beside a map."""
    if token_ids_C is None or _has_rows(files, name, vocab_size):
        output_VH = files.take(name, vocab_size, hidden_size)
        return output_VH if token_ids_C is None else output_VH[token_ids_C]
    return files.take(name, token_ids_C.shape[0], hidden_size)


def _has_rows(files: HeadFiles, name: str, num_rows: int) -> bool:
    shape = files.shape(name)
    return shape is not None and shape[0] == num_rows


def _checked_map(token_ids_C: Tensor, source: str, vocab_size: int) -> Tensor:
    token_ids_C = token_ids_C.to(torch.int64)
    if int(token_ids_C.min()) < 0 or int(token_ids_C.max()) >= vocab_size or len(set(token_ids_C.tolist())) < len(token_ids_C):
        raise BadHead(f"{source}: token_map must hold different token ids from 0 to {vocab_size - 1}")
    return token_ids_C


def _count(files: HeadFiles, keys: tuple[str, ...], pattern: re.Pattern[str], group: int) -> int:
    """Number of heads or layers: 1 + the largest number in the names. Configurations may name fewer heads than were trained."""
    found = 1 + max(int(match[group]) for name in files.names() if (match := pattern.fullmatch(name)))
    for key in keys:
        if (stated := files.config.get(key)) is not None and stated > found:
            raise BadHead(f"{files.source}: {key} is {stated}, but there are tensors of only {found}")
    return found
