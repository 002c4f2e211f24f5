"""The files of a drafting head: a folder, or a Hugging Face id, with config.json and one set of weights."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import cached_file

from replicas.model.hub import require_on_hub

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_SAFETENSORS = ("model.safetensors", "medusa_lm_head.safetensors")
_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
"""Read as tensors only: a pickle that would run code is rejected."""


class BadHead(ValueError):
    """The files of a head cannot be used with this target. The message is one line that names the file or tensor, and the reason."""


class HeadFiles:
    """The configuration and tensors of one head. A reader takes every tensor that it knows; `finish` rejects the file if one is left,
    because a head without some of its weights would draft badly without any other sign."""

    def __init__(self, source: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> None:
        """`prefixes` maps beginnings of tensors' names to what stands for them here; the first that fits is replaced."""
        self.source = source
        self.config = config
        self._tensors: dict[str, Tensor] = {}
        self._stored_names: dict[str, str] = {}
        for stored_name, tensor in tensors.items():
            prefix = next((prefix for prefix in prefixes if stored_name.startswith(prefix)), "")
            name = prefixes.get(prefix, "") + stored_name.removeprefix(prefix)
            if name in self._tensors:
                raise BadHead(f"{source}: tensors {self._stored_names[name]} and {stored_name} mean the same weights")
            self._tensors[name], self._stored_names[name] = tensor, stored_name

    @classmethod
    def read(cls, source: str, prefixes: Mapping[str, str]) -> HeadFiles:
        """Raises BadHead for a folder that lacks a file or has one that cannot be read."""
        return cls(source, read_config(source), _read_tensors(source), prefixes)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Tensors that were not taken yet."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensors[name].shape) if name in self._tensors else None

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name. Raises BadHead unless it exists and has the shape."""
        if name not in self._tensors:
            raise BadHead(f"{self.source} lacks tensor {name} {list(shape)}")
        tensor = self._tensors.pop(name)
        if tuple(tensor.shape) != shape:
            stored = self._stored_names[name]
            raise BadHead(f"{self.source}: tensor {stored} has shape {list(tensor.shape)}, where this target needs {list(shape)}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise BadHead(f"{self.source}: tensor {self._stored_names[name]} holds values that are not finite")
        return tensor

    def try_take(self, name: str, *shape: int) -> Tensor | None:
        """The tensor of this name, None if there is none. Raises BadHead if it has another shape."""
        return self.take(name, *shape) if name in self else None

    def drop(self, *names: str) -> None:
        """Takes tensors that are known to have no meaning here."""
        for name in names:
            self._tensors.pop(name, None)

    def finish(self) -> None:
        """Raises BadHead if a tensor was not taken."""
        if self._tensors:
            name = self.names()[0]
            raise BadHead(f"{self.source}: tensor {self._stored_names[name]} {list(self._tensors[name].shape)} is unknown in this layout")


def read_config(source: str) -> Mapping[str, Any]:
    """config.json of a head. Raises BadHead if it is missing or is no JSON object, and ValueError for an id that cannot be reached."""
    if not Path(source).expanduser().is_dir() and not source.startswith((".", "/", "~")):
        require_on_hub(source)
    path = _path_of(source, CONFIG)
    if path is None:
        raise BadHead(f"{source} has no {CONFIG}; give the folder of a head, or a Hugging Face id that can be reached")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadHead(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BadHead(f"{path} holds no JSON object")
    return config


def _read_tensors(source: str) -> dict[str, Tensor]:
    for name in _SAFETENSORS:
        if (path := _path_of(source, name)) is not None:
            return _load_safetensors(path)
    if (path := _path_of(source, _INDEX)) is not None:
        tensors: dict[str, Tensor] = {}
        for name in sorted(set(json.loads(path.read_text())["weight_map"].values())):
            if (part := _path_of(source, name)) is None:
                raise BadHead(f"{source} lacks {name}, which {_INDEX} names")
            tensors |= _load_safetensors(part)
        return tensors
    for name in _PICKLES:
        if (path := _path_of(source, name)) is not None:
            return _load_pickle(path)
    raise BadHead(f"{source} has no weights: none of {', '.join((*_SAFETENSORS, *_PICKLES))}")


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadHead(f"{path} is no readable safetensors file: {error}") from error


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadHead(f"{path} cannot be read as tensors only: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise BadHead(f"{path} holds no mapping from names to tensors")
    return tensors


def _path_of(source: str, name: str) -> Path | None:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    if source.startswith((".", "/", "~")):
        raise BadHead(f"the folder {source} does not exist")
    found = cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return None if found is None else Path(found)
