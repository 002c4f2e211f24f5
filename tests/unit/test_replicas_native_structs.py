"""ctypes structures against the sizes of the structs that the kernels were compiled with."""

from __future__ import annotations

import ctypes

import pytest

from replicas.attention import native as native_attention
from replicas.attention.native import NativeAttention
from replicas.model import native_decoder
from replicas.native.build import load_native_library
from replicas.native.structs import StructMismatch, check_structs
from replicas.sampling import native_draw
from replicas.sampling.native_draw import NativeDraw

MIRRORS = {
    "MantaAttentionArgs": native_attention._Args,
    "MantaDrawSettings": native_draw._Settings,
    "MantaLinear": native_decoder._Linear,
    "MantaLayer": native_decoder._Layer,
    "MantaDecoder": native_decoder._Decoder,
    "MantaStep": native_decoder._Step,
}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load_native_library()


def _longer(mirror: type[ctypes.Structure]) -> type[ctypes.Structure]:
    return type("Longer", (ctypes.Structure,), {"_fields_": [*mirror._fields_, ("extra", ctypes.c_void_p)]})


@pytest.mark.parametrize("name", MIRRORS)
def test_struct_with_one_field_more_is_refused_with_both_sizes(library: ctypes.CDLL, name: str) -> None:
    check_structs(library, **MIRRORS)
    size = ctypes.sizeof(MIRRORS[name])
    with pytest.raises(StructMismatch, match=rf"{name} has {size} bytes in the kernels and {size + 8} bytes in"):
        check_structs(library, **{**MIRRORS, name: _longer(MIRRORS[name])})


def test_struct_that_the_kernels_do_not_know_is_refused_by_name(library: ctypes.CDLL) -> None:
    with pytest.raises(StructMismatch, match="no struct MantaNothing"):
        check_structs(library, MantaNothing=native_decoder._Step)


def test_attention_and_draw_check_their_structs_before_the_first_call(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_attention, "_Args", _longer(native_attention._Args))
    with pytest.raises(StructMismatch, match="MantaAttentionArgs"):
        NativeAttention(library)
    monkeypatch.setattr(native_draw, "_Settings", _longer(native_draw._Settings))
    with pytest.raises(StructMismatch, match="MantaDrawSettings"):
        NativeDraw(library)
