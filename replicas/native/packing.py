"""Packs weights into the layout that the kernels read, and unpacks them. Letters: N outputs, K inputs, W words, G groups of inputs.

packed_weight.h defines the layout: panels of 16 outputs, each a sequence of 32-bit words that hold neighbouring inputs of one output.
In a word of eight int4 the first four are the lower halves of the bytes.
Quantization is asymmetric in groups of 32 inputs, rounded to nearest without calibration data. Existing integer codes are packed
unchanged. `unpack` is the plain reference that tests compare with.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 16
"""Outputs that the kernels compute together; packed weights and result rows are padded to a multiple of it."""
GROUP = 32
"""Inputs that share a scale. GGUF files use the same size, so weights converted from one lose almost nothing."""
LAYOUT_VERSION = 4
"""Version of the packed layout; raising it makes cached weights be packed again."""
_CHUNK_ELEMENTS = 1 << 24
"""Weights quantized at a time, to bound temporary memory."""


class Element(IntEnum):
    """Types of packed weights, numbered like `MantaElement` in decoder.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3

    @property
    def is_quantized(self) -> bool:
        return self >= Element.INT8

    @property
    def k_multiple(self) -> int:
        """Inputs are padded with zeros to a multiple of this."""
        return (1, 2, GROUP, GROUP)[self]

    @property
    def bits(self) -> int:
        return (32, 16, 8, 4)[self]


FLOAT_ELEMENTS = {torch.float32: Element.FLOAT32, torch.bfloat16: Element.BFLOAT16}
"""Torch dtype -> element, for weights that are not quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """The weights [N, K] of one linear, packed in panels."""

    element: Element
    panels_PW: Tensor
    """int32, one row per panel."""
    units_N: Tensor | None
    """float32, padded to whole panels; None for weights that are not quantized."""
    num_outputs: int
    num_k: int


def padded(size: int, multiple: int = PANEL) -> int:
    return -(-size // multiple) * multiple


def pack(weight_NK: Tensor, element: Element) -> PackedLinear:
    """Packs weights. For the float elements `weight_NK` must already have that dtype; quantization takes any float dtype."""
    num_outputs, num_k = weight_NK.shape
    rows = max(1, _CHUNK_ELEMENTS // (num_k * PANEL)) * PANEL
    parts = [_pack_rows(weight_NK[start : start + rows], element) for start in range(0, num_outputs, rows)]
    units = [units for _, units in parts if units is not None]
    panels_PW = torch.cat([panels for panels, _ in parts]) if len(parts) > 1 else parts[0][0]
    return PackedLinear(
        element=element,
        panels_PW=panels_PW,
        units_N=torch.cat(units) if units else None,
        num_outputs=num_outputs,
        num_k=num_k,
    )


def pack_codes(u_NK: Tensor, scale_NG: Tensor, least_NG: Tensor, units_N: Tensor, element: Element) -> PackedLinear:
    """Packs the weights units_N * (scale_NG * u_NK + least_NG) exactly. u is uint8, below 16 for int4; scale and least are whole numbers
    that fit int16; G counts groups of 32 inputs, the last of which may be short."""
    num_outputs, num_k = u_NK.shape
    rows = -num_outputs % PANEL
    u_NGK = pad(u_NK, (0, -num_k % GROUP, 0, rows)).view(num_outputs + rows, -1, GROUP)
    panels_PW = _group_panels(u_NGK, pad(scale_NG, (0, 0, 0, rows)), pad(least_NG, (0, 0, 0, rows)), element.bits)
    units_N = pad(units_N.float(), (0, rows))
    return PackedLinear(element=element, panels_PW=panels_PW, units_N=units_N, num_outputs=num_outputs, num_k=num_k)


def unpack(packed: PackedLinear) -> Tensor:
    """The weights [N, K] that the panels encode, as float32."""
    num_panels = packed.panels_PW.shape[0]
    num_k = padded(packed.num_k, packed.element.k_multiple)
    if packed.element.is_quantized:
        num_words = GROUP * packed.element.bits // 32 * PANEL
        words_PGW = packed.panels_PW.view(num_panels, num_k // GROUP, -1)
        bytes_ = words_PGW[:, :, :num_words].contiguous().view(torch.uint8).view(num_panels, num_k // GROUP, -1, PANEL, 4)
        bytes_ = bytes_.permute(0, 3, 1, 2, 4).reshape(num_panels * PANEL, num_k // GROUP, -1)
        u_NGK = bytes_ if packed.element is Element.INT8 else _with_halves_apart(bytes_)
        terms = words_PGW[:, :, num_words:].contiguous().view(torch.int16).view(num_panels, -1, PANEL, 2).float()
        scale_NG1, least_NG1 = (terms[..., i].transpose(1, 2).reshape(num_panels * PANEL, -1, 1) for i in (0, 1))
        weight_NK = (u_NGK * scale_NG1 + least_NG1).view(num_panels * PANEL, num_k)
    else:
        dtype = torch.float32 if packed.element is Element.FLOAT32 else torch.bfloat16
        values = packed.panels_PW.view(dtype).view(num_panels, -1, PANEL, packed.element.k_multiple)
        weight_NK = values.transpose(1, 2).reshape(num_panels * PANEL, num_k).float()
    if packed.units_N is not None:
        weight_NK = weight_NK * packed.units_N[:, None]
    return weight_NK[: packed.num_outputs, : packed.num_k].contiguous()


def _pack_rows(weight_NK: Tensor, element: Element) -> tuple[Tensor, Tensor | None]:
    num_outputs, num_k = weight_NK.shape
    weight_NK = pad(weight_NK, (0, -num_k % element.k_multiple, 0, -num_outputs % PANEL)).contiguous()
    if element.is_quantized:
        return _quantize(weight_NK.float(), element.bits)
    return _panels(weight_NK, element.k_multiple).view(torch.int32).flatten(1), None


def _panels(values_NK: Tensor, step: int) -> Tensor:
    """[N, K] as [panel, K / step, 16, step]."""
    num_outputs, num_k = values_NK.shape
    return values_NK.view(num_outputs // PANEL, PANEL, num_k // step, step).transpose(1, 2).contiguous()


def _quantize(weight_NK: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Panels of quantized groups, and units: weight = unit * (scale * u + least), with u of `bits` bits, scale and least int16."""
    num_outputs, most = weight_NK.shape[0], 2**bits - 1
    units_N = weight_NK.abs().amax(1) / 32767
    units_N = torch.where(units_N > 0, units_N, 1.0)  # a row of zeros needs a nonzero unit too
    weight_NGK = weight_NK.view(num_outputs, -1, GROUP) / units_N[:, None, None]
    least_NG = weight_NGK.amin(-1).round_()
    scale_NG = ((weight_NGK.amax(-1) - least_NG) / most).ceil_().clamp_(min=1)  # up, so that the largest weight is reached
    u_NGK = ((weight_NGK - least_NG[..., None]) / scale_NG[..., None]).round_().clamp_(0, most).to(torch.uint8)
    return _group_panels(u_NGK, scale_NG, least_NG, bits), units_N


def _group_panels(u_NGK: Tensor, scale_NG: Tensor, least_NG: Tensor, bits: int) -> Tensor:
    """Panels in which the words of each group are followed by its scales and leasts."""
    num_outputs = u_NGK.shape[0]
    if bits == 4:
        first, last = u_NGK.view(*u_NGK.shape[:-1], -1, 2, 4).unbind(-2)
        u_NGK = (first | last << 4).flatten(-2)
    words_PGW = _panels(u_NGK.view(num_outputs, -1), 4).view(torch.int32).view(num_outputs // PANEL, least_NG.shape[1], -1)
    terms_NG2 = torch.stack([scale_NG, least_NG], -1).to(torch.int16)
    terms_PGW = _panels(terms_NG2.flatten(1), 2).view(torch.int32).flatten(2)
    return torch.cat([words_PGW, terms_PGW], -1).flatten(1)


def _with_halves_apart(bytes_: Tensor) -> Tensor:
    """The eight int4 in every four bytes, lower halves first."""
    words = bytes_.view(*bytes_.shape[:-1], -1, 4)
    return torch.cat([words & 15, words >> 4], dim=-1).flatten(-2)
