"""Reads parts of a model's safetensors; only the part is ever in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from replicas.linear.method import name_in_checkpoint
from replicas.model_support import UnsupportedModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """Owns the open files of one folder or Hugging Face id, which are opened when the first tensor is read. Tensors are named as in the
    checkpoint or as the model's parameters. Without safetensors every method raises UnsupportedModel."""

    def __init__(self, source: str, prefix: str, *, is_dense: bool) -> None:
        """`prefix` is the model's base name, which some checkpoints leave out. Error messages for a dense checkpoint (`is_dense`) also
        propose one rank, where transformers itself loads it."""
        self.source = source
        self._way_out = "save it with save_pretrained" + (", or set tensor_parallel_size to 1" if is_dense else "")
        self._prefix = f"{prefix}."
        self._files: dict[Path, Any] = {}

    def has(self, name: str) -> bool:
        return self._stored_name(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(
        self, name: str, dtype: torch.dtype, device: torch.device, dim: int = 0, ranges: Sequence[range] | None = None
    ) -> torch.Tensor:
        """One tensor, or its `ranges` along `dim` concatenated. Raises UnsupportedModel when the checkpoint lacks it."""
        part = self._slice(name)
        if ranges is None:
            return part[:].to(device, dtype) if part.get_shape() else self._whole(name).to(device, dtype)
        parts = [part[span.start : span.stop] if dim == 0 else part[:, span.start : span.stop] for span in ranges]
        return (torch.cat(parts, dim) if len(parts) > 1 else parts[0]).to(device, dtype).contiguous()

    @cached_property
    def _places(self) -> dict[str, Path]:
        """Tensor name -> file."""
        source = self.source
        index = _path_of(source, INDEX)
        if index is not None:
            by_file: dict[str, str] = json.loads(index.read_text())["weight_map"]
            paths = {file: _path_of(source, file) for file in set(by_file.values())}
            if missing := sorted(file for file, path in paths.items() if path is None):
                raise UnsupportedModel(f"cannot load {source}: it lacks {', '.join(missing)}, which {INDEX} names")
            return {name: path for name, file in by_file.items() if (path := paths[file]) is not None}
        single = _path_of(source, SINGLE)
        if single is None:
            raise UnsupportedModel(f"cannot load {source} in parts: it has neither {SINGLE} nor {INDEX}; {self._way_out}")
        return dict.fromkeys(self._open(single).keys(), single)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt", device="cpu")
        return self._files[path]

    def _stored_name(self, name: str) -> str | None:
        name = name_in_checkpoint(name)
        candidates = (name, name.removeprefix(self._prefix), self._prefix + name)
        return next((candidate for candidate in candidates if candidate in self._places), None)

    def _require(self, name: str) -> str:
        stored = self._stored_name(name)
        if stored is None:
            raise UnsupportedModel(f"cannot load {self.source} in parts: the checkpoint has no tensor {name}; {self._way_out}")
        return stored

    def _slice(self, name: str) -> Any:
        stored = self._require(name)
        return self._open(self._places[stored]).get_slice(stored)

    def _whole(self, name: str) -> torch.Tensor:
        stored = self._require(name)
        tensor: torch.Tensor = self._open(self._places[stored]).get_tensor(stored)
        return tensor


def _path_of(source: str, file: str) -> Path | None:
    folder = Path(source)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    found = cached_file(
        source, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return None if found is None else Path(found)
