"""Checks of the fused layers kernel in the interpreter; `test_ops_triton` runs this file as a process.

The interpreter runs programs one after another, so each stage is a launch of its own. The grid barrier is
checked on a GPU, by `bench/micro/gpu/op_times.py`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import torch

import triton_checks  # first: it enables the interpreter before the kernels are imported
from draftproof.models.layers import run_layers
from draftproof.ops import Attention, AttentionShape, Layer, Mlp
from draftproof.ops.triton.fused import layers as fused_layers
from draftproof.ops.triton.gemm.weight import PackedLinear
from opcheck import Paged, bits

triton, tl = fused_layers.triton, fused_layers.tl
ops, randn, check = triton_checks.ops, triton_checks.randn, triton_checks.check
BF16 = torch.bfloat16
NARROW = AttentionShape(num_q=4, num_kv=2, dim=32, scale=0.2, window=0)
WIDE = AttentionShape(num_q=3, num_kv=1, dim=64, scale=0.125, window=0)
fused_layers.MAX_PANEL_DEPTH = 128  # the down projection in two parts
fused_layers.ROW_CONFIGS = (
    fused_layers.RowConfig(4, 1024, 1, False, 32, 0),
    fused_layers.RowConfig(64, 1024, 2, True, 64, 2),
)
FEW, MANY = 3, 12  # programs: only with many of them all spans run at once


def decoder(
    heads: AttentionShape, hidden: int, inner: int, bias: bool, windows: tuple[int, ...]
) -> list[Layer]:
    def packed(columns: int, depth: int, seed: int) -> PackedLinear:
        weight = (randn(columns, depth, seed=seed) / depth**0.5).to(BF16)
        extra = randn(columns, seed=seed + 50, dtype=BF16).float() if bias else None
        return PackedLinear(weight, extra)

    width, total = heads.num_q * heads.dim, (heads.num_q + 2 * heads.num_kv) * heads.dim
    return [
        Layer(
            attention_norm=randn(hidden, seed=9 * i, dtype=BF16),
            attention=Attention(
                heads=replace(heads, window=window),
                qkv=packed(total, hidden, 9 * i + 1),
                out=packed(hidden, width, 9 * i + 2),
            ),
            mlp_norm=randn(hidden, seed=9 * i + 3, dtype=BF16),
            mlp=Mlp(gate_up=packed(2 * inner, hidden, 9 * i + 4), down=packed(hidden, inner, 9 * i + 5)),
        )
        for i, window in enumerate(windows)
    ]


def assert_bits_of_separate_ops(
    heads: AttentionShape, hidden: int, bias: bool, windows: tuple[int, ...], pieces: int = 0
) -> None:
    """Compare hidden rows, K and V with the separate ops; padding stores nothing."""
    layers, norm = decoder(heads, hidden, 256, bias, windows), randn(hidden, seed=7, dtype=BF16)
    paged, rope = Paged(heads, [131, 7, 19, 300], dtype=BF16), randn(512, heads.dim, seed=5)
    caches = [paged.cache * (1 + i) for i in range(len(layers))]
    for cache, window in zip(caches, windows, strict=True):
        if window:  # the only row of slot 3 does not read keys before its window
            flat = cache.view(2, -1, heads.num_kv, heads.dim)
            flat[:, [paged.place(3, p) for p in range(300 - window)]] = torch.nan
    several = [(0, p) for p in range(125, 131)] + [(1, 6), (2, 3), (3, 299)]
    many = [(0, p) for p in range(114, 131)] + several[-3:]  # two tiles of rows
    cases = ((FEW, 1, several),) if bias else ((MANY, 0, several), (FEW, 1, many))
    for programs, tiles, where in (*cases, (FEW, 0, [(3, 299)])):
        rows = paged.rows([*where, (1, 0), (1, 0)])
        rows.slots[-2:] = -1  # padding
        x = randn(len(where) + 2, hidden, seed=3, dtype=BF16)
        assert ops.forward._fused_layers.supports(x, layers)
        ours, theirs = ([cache.clone() for cache in caches] for _ in range(2))
        ops.forward._fused_layers.programs = programs
        mixed = ops.forward._fused_layers._buffer(
            "mixed", fused_layers.MAX_ROWS * heads.num_q * heads.dim, BF16
        ).fill_(7)
        made = run_layers(ops, x.clone(), layers, norm, rows, rope, ours, 1e-5)
        wanted = run_layers(ops, x, layers, norm, rows, rope, theirs, 1e-5, fused=False)
        for got, want in zip(made, wanted, strict=True):
            assert bits(got[:-2]) == bits(want[:-2]), (where, (got != want).any(1).tolist())
        assert all(bits(a) == bits(b) for a, b in zip(ours, theirs, strict=True)), where
        listed = ops.forward._fused_layers._scratch["listed"].view(-1, 8)
        items = listed[1 : 1 + int(listed[0, 0])]
        assert (listed[0, 1] > 0) == tiles
        assert not tiles or (items[:, 7].max() > 1) == (pieces > 0)
        assert not pieces or listed[0, 1] in (0, pieces)
        assert bool((mixed[len(where) * heads.num_q * heads.dim :] == 7).all()), "attention ran for padding"
    assert not ops.forward._fused_layers._scratch["arrived"].any()


def head_layer(layer: Layer, hidden: int) -> Layer:
    """Return the layer with a QKV weight that also reads the norm of a token's embedding."""
    wide = (randn(256, 2 * hidden, seed=70) / 20).to(BF16)
    attention = replace(layer.attention, qkv=PackedLinear(wide, layer.attention.qkv.bias))
    return replace(layer, attention=attention, token_norm=randn(hidden, seed=71, dtype=BF16))


@check
def taps_and_token_norm_have_the_bits_of_separate_ops() -> None:
    heads, hidden = NARROW, 192
    layers, norm = decoder(heads, hidden, 256, True, (0, 0)), randn(hidden, seed=7, dtype=BF16)
    first = head_layer(layers[0], hidden)
    paged, rope = Paged(heads, [131, 7, 19, 300], dtype=BF16), randn(512, heads.dim, seed=5)
    rows = paged.rows([(0, 129), (0, 130), (1, 6), (3, 299), (1, 0)])
    rows.slots[-1] = -1
    rows.tokens.copy_(torch.tensor([3, 0, 10, 7, -5]))  # padding: any number
    x, table = randn(5, hidden, seed=3, dtype=BF16), randn(11, hidden, seed=4, dtype=BF16)
    for these, taps in ((layers, (1, 0)), ([first, layers[1]], (0,)), ([first], ())):
        last = norm if taps else None
        ours, theirs = ([paged.cache.clone() for _ in these] for _ in range(2))
        assert ops.forward._fused_layers.supports(x, these)
        made = run_layers(ops, x.clone(), these, last, rows, rope, ours, 1e-5, taps, table)
        real = replace(rows, tokens=rows.tokens.clamp(min=0))
        wanted = run_layers(ops, x, these, last, real, rope, theirs, 1e-5, taps, table, fused=False)
        assert len(made) == len(wanted) == 2 + len(taps)
        for got, want in zip(made, wanted, strict=True):
            assert bits(got[:-1]) == bits(want[:-1])
        assert all(bits(a) == bits(b) for a, b in zip(ours, theirs, strict=True))
    assert bits(made[0]) != bits(x)
    assert not ops.forward._fused_layers.supports(x, [layers[1], first])
    assert not ops.forward._fused_layers.supports(x, [replace(first, residual_is_normed=True)])
    assert not ops.forward._fused_layers.supports(x, [replace(layers[0], attention_norm=None)])


@triton.jit
def first_row_padding(slots, R, ROWS):  # type: ignore[no-untyped-def]
    """Replace `all_rows_padding` by a check of the first row only."""
    return tl.load(slots) < 0


@triton.jit
def no_row_padding(slots, R, ROWS):  # type: ignore[no-untyped-def]
    return R < 0


@check
def draft_round_without_live_rows_stores_nothing() -> None:
    """Check a round of padding only, and rounds with one live row at several places."""
    heads, hidden = NARROW, 64
    layer = head_layer(decoder(heads, hidden, 256, False, (0,))[0], hidden)
    paged, rope = Paged(heads, [131, 7, 19, 300], dtype=BF16), randn(512, heads.dim, seed=5)
    x, table = randn(6, hidden, seed=3, dtype=BF16), randn(11, hidden, seed=4, dtype=BF16)

    def is_wrong(live: int | None) -> bool:
        rows = paged.rows([(0, 129), (0, 130), (1, 6), (3, 299), (1, 0), (2, 18)])
        rows.tokens.clamp_(max=10)
        slots = rows.slots.clone()
        rows.slots.fill_(-1)
        if live is not None:
            rows.slots[live] = slots[live]
        ours, theirs = [paged.cache.clone()], [paged.cache.clone()]
        mine = x.clone()
        scratch = [
            ops.forward._fused_layers._buffer(name, 1, BF16).fill_(7) for name in ("q", "mixed", "inner")
        ]
        run_layers(ops, mine, [layer], None, rows, rope, ours, 1e-5, (), table)
        if live is None:
            idle = all(bool((part == 7).all()) for part in scratch)
            return not idle or bits(mine) != bits(x) or bits(ours[0]) != bits(paged.cache)
        given = ops, x.clone(), [layer], None, rows, rope, theirs, 1e-5, (), table
        want = run_layers(*given, fused=False)[0]
        return bits(mine[live]) != bits(want[live]) or bits(ours[0]) != bits(theirs[0])

    assert not any(is_wrong(live) for live in (None, 0, 2, 5))
    with mock.patch.object(fused_layers, "all_rows_padding", first_row_padding):
        assert is_wrong(5) and not is_wrong(0)
    with mock.patch.object(fused_layers, "all_rows_padding", no_row_padding):
        assert is_wrong(None) and not is_wrong(5)


@check
def layers_have_the_bits_of_separate_ops() -> None:
    assert_bits_of_separate_ops(NARROW, 192, False, (0,))  # two layers: below, and with taps


@check
def layers_with_bias_and_windows_have_the_bits_of_separate_ops() -> None:
    assert_bits_of_separate_ops(WIDE, 64, True, (0, 140))


@check
def pieces_of_tiles_have_the_bits_of_separate_ops() -> None:
    """Divide tiles into pieces of two spans by a merge cost below zero."""
    with mock.patch.object(fused_layers, "MERGE_COST", -1):
        assert_bits_of_separate_ops(NARROW, 64, False, (0,), pieces=2)
        assert_bits_of_separate_ops(WIDE, 64, True, (260,), pieces=2)


@check
def unsupported_layers_are_rejected() -> None:
    heads, x = NARROW, randn(2, 192, dtype=BF16)
    layer = decoder(heads, 192, 256, False, (0,))[0]
    supports = ops.forward._fused_layers.supports
    assert supports(x, [layer, layer])
    assert not supports(x.float(), [layer]) and not supports(x[:0], [layer])
    assert not supports(x.repeat(fused_layers.MAX_ROWS, 1), [layer])
    attention = layer.attention
    assert not supports(x, [layer, replace(layer, attention=replace(attention, q_norm=x[0]))])
    small_heads = replace(attention, heads=replace(heads, dim=16))
    assert not supports(x, [replace(layer, attention=small_heads)])
    assert not supports(x, decoder(heads, 192, 250, False, (0,)))
    assert not supports(x[:, :96].contiguous(), decoder(heads, 96, 256, False, (0,)))


def main(only: list[str]) -> None:
    """Run the checks of this file."""
    triton_checks.run_checks(triton_checks.CHECKS[__name__], only)


if __name__ == "__main__":
    main(sys.argv[1:])
