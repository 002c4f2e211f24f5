"""Blocks as messages: every pair of layouts, unequal ranks, and the canonical order itself."""

import pytest
import torch

from kvcache.handoff import HeadShare, plan_heads
from kvcache.spec import CANONICAL_LAYOUT, KVGroupSpec, KVLayout
from kvcache.tensors import KVTensors
from kvcache.wire import WireFormat, num_values_per_block, pack, parse_layout, unpack, why_not_form, wire_layout

LAYOUTS = [CANONICAL_LAYOUT, KVLayout("hdt", "htd"), KVLayout("thd", "dth")]
NUM_LAYERS, NUM_HEADS, BLOCK_SIZE, K_DIM, V_DIM = 3, 6, 4, 5, 7


def _tensors(layout: KVLayout, num_heads: int = NUM_HEADS, dtype: torch.dtype = torch.float32, num_blocks: int = 6) -> KVTensors:
    group = KVGroupSpec(layers=tuple(range(NUM_LAYERS)), kind="full", window=None, num_kv_heads=num_heads, k_dim=K_DIM, v_dim=V_DIM)
    kv = KVTensors([group], layout=layout, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device=torch.device("cpu"))
    kv.fill(range(num_blocks), float("nan"))
    return kv


def _number(kv: KVTensors, first_head: int = 0) -> KVTensors:
    """Every value says where it belongs: layer, K or V, block, head, token, dim."""
    for layer in range(NUM_LAYERS):
        for is_v, tensor in enumerate(kv.canonical(layer)):
            num_blocks, num_heads, num_tokens, dim = tensor.shape
            b, h, t, d = torch.meshgrid(*map(torch.arange, (num_blocks, num_heads, num_tokens, dim)), indexing="ij")
            tensor.copy_(((((layer * 2 + is_v) * 10 + b) * 10 + h + first_head) * 10 + t) * 10 + d)
    return kv


def _form(layout: KVLayout, heads: tuple[int, int] | None = None) -> WireFormat:
    return WireFormat(layout=layout, layers=(0, NUM_LAYERS), heads=heads)


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.id)
@pytest.mark.parametrize("target", LAYOUTS, ids=lambda layout: layout.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_between_any_two_layouts_arrive_and_nothing_else_changes(source: KVLayout, target: KVLayout, dtype: torch.dtype) -> None:
    giver, taker = _number(_tensors(source, dtype=dtype)), _tensors(target, dtype=dtype)
    form = _form(wire_layout(source, target.id))
    unpack(taker, [1, 5], pack(giver, [4, 0], form), form)
    for layer in range(NUM_LAYERS):
        for ours, theirs in zip(giver.canonical(layer), taker.canonical(layer), strict=True):
            assert torch.equal(ours[[4, 0]], theirs[[1, 5]])
            assert torch.isnan(theirs[[0, 2, 3, 4]]).all()


def test_canonical_message_has_the_order_of_the_spec() -> None:
    kv = _number(_tensors(KVLayout("hdt", "htd")))
    data = pack(kv, [2, 3], _form(CANONICAL_LAYOUT)).view(NUM_LAYERS, 2, -1)
    k_size = NUM_HEADS * BLOCK_SIZE * K_DIM
    k_LBHTD = data[..., :k_size].unflatten(-1, (NUM_HEADS, BLOCK_SIZE, K_DIM))
    v_LBHTD = data[..., k_size:].unflatten(-1, (NUM_HEADS, BLOCK_SIZE, V_DIM))
    assert float(k_LBHTD[1, 0, 3, 2, 4]) == ((((1 * 2 + 0) * 10 + 2) * 10 + 3) * 10 + 2) * 10 + 4
    assert float(v_LBHTD[2, 1, 5, 3, 6]) == ((((2 * 2 + 1) * 10 + 3) * 10 + 5) * 10 + 3) * 10 + 6


def test_equal_layouts_move_the_bytes_as_they_lie() -> None:
    layout = KVLayout("thd", "dth")
    kv = _number(_tensors(layout))
    assert wire_layout(layout, layout.id) == layout
    data = pack(kv, [1], _form(layout)).view(NUM_LAYERS, -1)
    for layer in range(NUM_LAYERS):
        k, v = kv.layer(layer)
        assert torch.equal(data[layer], torch.cat([k[1].flatten(), v[1].flatten()]))


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 2), (2, 1), (2, 3), (3, 2), (6, 1), (1, 6)])
@pytest.mark.parametrize("layouts", [(LAYOUTS[1], LAYOUTS[1]), (LAYOUTS[1], LAYOUTS[2])], ids=["same", "converted"])
def test_unequal_numbers_of_ranks_reshard_by_heads(num_sources: int, num_targets: int, layouts: tuple[KVLayout, KVLayout]) -> None:
    share, part = NUM_HEADS // num_sources, NUM_HEADS // num_targets
    shares = [HeadShare(first=i * share, end=(i + 1) * share, address="") for i in range(num_sources)]
    givers = [_number(_tensors(layouts[0], share), first_head=i * share) for i in range(num_sources)]
    for rank in range(num_targets):
        taker = _tensors(layouts[1], part)
        for one in plan_heads(shares, rank * part, (rank + 1) * part):
            layout = wire_layout(layouts[0], layouts[1].id)
            unpack(taker, [3, 2], pack(givers[one.share], [0, 5], _form(layout, one.source)), _form(layout, one.target))
        expected = _number(_tensors(layouts[1], part), first_head=rank * part)
        for layer in range(NUM_LAYERS):
            for ours, theirs in zip(expected.canonical(layer), taker.canonical(layer), strict=True):
                assert torch.equal(ours[[0, 5]], theirs[[3, 2]])


def test_message_of_a_wrong_size_is_refused() -> None:
    kv = _tensors(CANONICAL_LAYOUT)
    form = _form(CANONICAL_LAYOUT)
    assert num_values_per_block(kv, form) == NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * (K_DIM + V_DIM)
    with pytest.raises(ValueError, match="2 blocks must hold"):
        unpack(kv, [0, 1], torch.zeros(num_values_per_block(kv, form)), form)


def test_form_outside_of_the_memory_is_named() -> None:
    kv = _tensors(CANONICAL_LAYOUT)
    assert why_not_form(kv, _form(CANONICAL_LAYOUT, (0, NUM_HEADS))) is None
    assert "heads (0, 7)" in (why_not_form(kv, _form(CANONICAL_LAYOUT, (0, 7))) or "")
    assert "layers (0, 4)" in (why_not_form(kv, WireFormat(layout=CANONICAL_LAYOUT, layers=(0, 4), heads=None)) or "")


def test_layout_id_reads_back_and_nonsense_is_refused() -> None:
    assert [parse_layout(layout.id) for layout in LAYOUTS] == LAYOUTS
    with pytest.raises(ValueError, match="k_axes"):
        parse_layout("xyz")
