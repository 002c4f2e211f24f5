"""Random heads on disk, with the names and shapes that their trainers write, and a target for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvcache.hashing import CacheIdentity
from kvcache.prefix_cache import BlockKeyChain
from replicas.native.thread_team import ThreadTeam
from replicas.request import GenerationRequest
from replicas.sampling_params import SamplingParams
from replicas.scheduling.request_state import RequestState
from replicas.speculation.heads.target import HeadTarget

BLOCK_SIZE = 4


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)


def head_target(lm_head_VH: Tensor, embedding_VH: Tensor | None = None, *, num_layers: int = 4, library: Any = None) -> HeadTarget:
    """A float32 target with this output layer."""
    vocab_size, hidden_size = lm_head_VH.shape
    return HeadTarget(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_layers=num_layers,
        dtype=torch.float32,
        device=torch.device("cpu"),
        library=library,
        team=None if library is None else ThreadTeam(library),
        embedding_VH=lm_head_VH if embedding_VH is None else embedding_VH,
        output_rows=lambda token_ids: lm_head_VH[token_ids],
        logits=lambda hidden_RH: hidden_RH @ lm_head_VH.T,
    )


def request_state(token_ids: list[int], name: str = "r", params: SamplingParams | None = None, *, seed: int = 0) -> RequestState:
    """A request whose last token is its only output."""
    params = params or SamplingParams(temperature=0.0, max_tokens=64)
    request = GenerationRequest(request_id=name, prompt_ids=tuple(token_ids[:-1]), params=params, seed=seed)
    state = RequestState(request, arrival_number=0, chain=BlockKeyChain(CacheIdentity(), BLOCK_SIZE), max_num_tokens=200)
    state.append(token_ids[-1])
    return state


def write_tokenizer(folder: Path, num_ids: int) -> None:
    """A word for each id."""
    words = Tokenizer(models.WordLevel({f"w{token_id}": token_id for token_id in range(num_ids)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
