"""Reads EAGLE-1/2 (arXiv 2401.15077, 2406.16858) and EAGLE-3 (2503.01840) heads in the layouts of their authors, SpecForge and speculators.
Letters: H the head's hidden size, V the target's vocabulary, C token ids that the head drafts, A width of the attention's input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.speculation.heads.eagle_settings import EagleSettings, read_settings
from replicas.speculation.heads.head_files import BadHead, HeadFiles

_PREFIXES = {"model.midlayer.": "layers.0.", "midlayer.": "layers.0.", "model.": ""}
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "layers.0.self_attn.rotary_emb.inv_freq")
"""The target's own weights, and constants that follow from the settings."""

Linear = tuple[Tensor, Tensor | None]
"""Weight [N, K] and bias [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleWeights:
    settings: EagleSettings
    fc: Linear
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    input_norm_H: Tensor | None
    """Of the embedding; None in EAGLE-1."""
    hidden_norm_H: Tensor | None
    post_norm_H: Tensor
    final_norm_H: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    fc_norms: tuple[Tensor, ...]
    """Of the target's hidden states, in front of `fc`: none, one over all, or one for each."""
    embedding_VH: Tensor | None
    """None takes the target's."""
    output_CH: Tensor | None
    """None takes the target's rows."""
    token_ids_C: Tensor | None
    """Token id of each row of the output layer, ascending; None if row i is token i."""


def read_eagle(source: str, *, hidden_size: int, vocab_size: int, num_layers: int) -> EagleWeights:
    """Raises BadHead if the files do not fit a target of these sizes, or ask for something that would change its output."""
    files = HeadFiles.read(source, _PREFIXES)
    files.drop(*_UNUSED)
    is_eagle3 = "layers.0.hidden_norm.weight" in files
    settings = read_settings(
        files.config,
        source,
        is_eagle3=is_eagle3,
        target_hidden_size=hidden_size,
        num_target_layers=num_layers,
        target_vocab_size=vocab_size,
    )
    size, dim = settings.hidden_size, settings.head_dim
    width_A = 2 * size if is_eagle3 else size
    name = "layers.0.self_attn"
    qkv = _joined(
        _linear(files, f"{name}.q_proj", settings.num_heads * dim, width_A),
        _linear(files, f"{name}.k_proj", settings.num_kv_heads * dim, width_A),
        _linear(files, f"{name}.v_proj", settings.num_kv_heads * dim, width_A),
    )
    out = _linear(files, f"{name}.o_proj", size, settings.num_heads * dim)
    q_norm_D, k_norm_D = files.try_take(f"{name}.q_norm.weight", dim), files.try_take(f"{name}.k_norm.weight", dim)
    gate_up = _joined(
        _linear(files, "layers.0.mlp.gate_proj", settings.intermediate_size, size),
        _linear(files, "layers.0.mlp.up_proj", settings.intermediate_size, size),
    )
    down = _linear(files, "layers.0.mlp.down_proj", size, settings.intermediate_size)
    post_norm_H = files.take("layers.0.post_attention_layernorm.weight", size)
    if is_eagle3:
        fc = _linear(files, "fc", size, len(settings.layer_ids) * hidden_size)
    else:
        fc = _linear(files, "fc", size, 2 * size, needs_bias=settings.has_bias is True)
    token_ids_C, order_C = _token_ids(files, settings, vocab_size)
    num_rows = vocab_size if token_ids_C is None else token_ids_C.shape[0]
    output_CH = files.try_take("lm_head.weight", num_rows, size)
    if output_CH is not None and order_C is not None:
        output_CH = output_CH[order_C]
    embedding_VH = files.try_take("embed_tokens.weight", vocab_size, size)
    if size != hidden_size:
        for missing, tensor in (("embed_tokens.weight", embedding_VH), ("lm_head.weight", output_CH)):
            if tensor is None:
                raise BadHead(
                    f"{source} lacks tensor {missing}; its hidden size is {size}, so it cannot share the target's ({hidden_size})"
                )
    weights = EagleWeights(
        settings=settings,
        fc=fc,
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        input_norm_H=files.take("layers.0.input_layernorm.weight", size) if is_eagle3 else None,
        hidden_norm_H=files.take("layers.0.hidden_norm.weight", size) if is_eagle3 else None,
        post_norm_H=post_norm_H,
        final_norm_H=files.take("norm.weight", size) if is_eagle3 else None,
        q_norm_D=q_norm_D,
        k_norm_D=k_norm_D,
        fc_norms=_fc_norms(files, settings, hidden_size),
        embedding_VH=embedding_VH,
        output_CH=output_CH,
        token_ids_C=token_ids_C,
    )
    files.finish()
    return weights


def _linear(files: HeadFiles, name: str, num_outputs: int, num_inputs: int, *, needs_bias: bool = False) -> Linear:
    take_bias = files.take if needs_bias else files.try_take
    return files.take(f"{name}.weight", num_outputs, num_inputs), take_bias(f"{name}.bias", num_outputs)


def _joined(*linears: Linear) -> Linear:
    """Several linears as one, their outputs in order."""
    weight_NK = torch.cat([weight for weight, _ in linears])
    if all(bias is None for _, bias in linears):
        return weight_NK, None
    return weight_NK, torch.cat([weight.new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in linears])


def _fc_norms(files: HeadFiles, settings: EagleSettings, target_hidden_size: int) -> tuple[Tensor, ...]:
    num_states = len(settings.layer_ids)
    if settings.norm_before_fc:
        return (files.take("input_norm.weight", num_states * target_hidden_size),)
    if settings.fc_norm:
        return tuple(files.take(f"fc_norm.{index}.weight", target_hidden_size) for index in range(num_states))
    return ()


def _token_ids(files: HeadFiles, settings: EagleSettings, vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    """Target ids of the head's own ids, ascending, and the order of the head's ids that makes them so. `d2t` holds target id - draft id."""
    num_ids = settings.draft_vocab_size or vocab_size
    if "d2t" not in files:
        files.drop("t2d")
        if num_ids != vocab_size:
            raise BadHead(
                f"{files.source} lacks tensor d2t [{num_ids}]: its draft_vocab_size is {num_ids}, and the target has {vocab_size} ids"
            )
        return None, None
    token_ids_C = files.take("d2t", num_ids).to(torch.int64) + torch.arange(num_ids)
    if int(token_ids_C.min()) < 0 or int(token_ids_C.max()) >= vocab_size or len(set(token_ids_C.tolist())) < len(token_ids_C):
        raise BadHead(f"{files.source}: tensor d2t must give different token ids from 0 to {vocab_size - 1}")
    if (is_drafted_V := files.try_take("t2d", vocab_size)) is not None:
        expected_V = torch.zeros(vocab_size, dtype=torch.bool)
        expected_V[token_ids_C] = True
        if not torch.equal(is_drafted_V.bool(), expected_V):
            raise BadHead(f"{files.source}: tensors d2t and t2d name different token ids")
    order_C = token_ids_C.argsort()
    return token_ids_C[order_C], order_C
