"""Quantized weights on disk: a model is quantized once, not at each start."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from replicas.native.packing import LAYOUT_VERSION, Element, PackedLinear, pack

logger = logging.getLogger(__name__)


class PackedCache:
    """The packed linears of one model in one file, named by a digest of the original weights. The file appears only when complete.

    A cache that cannot be read is rebuilt; one that cannot be written is skipped with a warning. All models in the folder together
    take at most `max_bytes`; the least recently used file is removed first.
    """

    def __init__(self, key: str, max_bytes: int, folder: Path | None = None) -> None:
        """`key` names the weights and their quantization (`content_key`). `folder` defaults to `~/.cache/manta/packed`."""
        self._path = (folder or Path.home() / ".cache" / "manta" / "packed") / f"{key}.safetensors"
        self._max_bytes = max_bytes
        self._cached = self._read()
        self._made: dict[str, Tensor] = {}

    def linear(self, name: str, weight_NK: Tensor, element: Element) -> PackedLinear:
        """The packed weights of one linear, quantized now unless they are cached."""
        panels_PW, units_N = self._cached.get(f"{name}.panels"), self._cached.get(f"{name}.units")
        if panels_PW is not None and units_N is not None:
            num_outputs, num_k = weight_NK.shape
            return PackedLinear(element=element, panels_PW=panels_PW, units_N=units_N, num_outputs=num_outputs, num_k=num_k)
        packed = pack(weight_NK, element)
        assert packed.units_N is not None, "only quantized weights are worth a cache"
        self._made |= {f"{name}.panels": packed.panels_PW, f"{name}.units": packed.units_N}
        return packed

    def save(self) -> None:
        """Writes the file if any linear was not cached. Called once, after `linear` was called for all of them."""
        if self._made:
            try:
                self._write()
            except (OSError, SafetensorError) as error:
                logger.warning("cannot keep the quantized weights in %s: %s", self._path, error)
        self._made, self._cached = {}, {}

    def _read(self) -> dict[str, Tensor]:
        if not self._path.exists():
            return {}
        try:
            if self._digest_path.read_text() != _digest(self._path):
                raise OSError("its digest differs")
            cached: dict[str, Tensor] = load_file(self._path)
        except (OSError, SafetensorError) as error:
            logger.warning("quantizing again, %s is damaged: %s", self._path, error)
            return {}
        with contextlib.suppress(OSError):  # the file may belong to another user, who then keeps its age
            self._path.touch()
        logger.info("quantized weights from %s", self._path)
        return cached

    def _write(self) -> None:
        num_bytes = sum(tensor.nbytes for tensor in self._made.values())
        if num_bytes > self._max_bytes:
            logger.info("not keeping %d MiB of quantized weights: quantized_cache_bytes is %d", num_bytes >> 20, self._max_bytes)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
            written = Path(folder) / self._path.name
            save_file(self._made, written)
            digest = written.with_suffix(".sha256")
            digest.write_text(_digest(written))
            written.replace(self._path)
            digest.replace(self._digest_path)
        logger.info("kept the quantized weights in %s (%d MiB)", self._path, num_bytes >> 20)
        self._evict(self._max_bytes - num_bytes)

    def _evict(self, max_bytes: int) -> None:
        """Keeps the most recent `max_bytes` of other files; files left in the folder of a killed process count too."""
        used = []
        for path in self._path.parent.rglob(f"*{self._path.suffix}"):
            with contextlib.suppress(FileNotFoundError):  # another process evicts as well
                if path != self._path:
                    used.append((path.stat().st_mtime, path.stat().st_size, path))
        for _, num_bytes, path in sorted(used, reverse=True):
            max_bytes -= num_bytes
            if max_bytes < 0:
                path.unlink(missing_ok=True)
                path.with_suffix(".sha256").unlink(missing_ok=True)
                logger.info("removed %s (%d MiB), which was used longest ago", path, num_bytes >> 20)

    @property
    def _digest_path(self) -> Path:
        return self._path.with_suffix(".sha256")


def content_key(model: torch.nn.Module, quantization: str) -> str:
    """A digest of every weight's name, shape and bytes. The same model in another folder shares the cache; a changed one never does."""
    digest = hashlib.sha256(f"{quantization} {LAYOUT_VERSION}".encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"{quantization}-{digest.hexdigest()[:24]}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
