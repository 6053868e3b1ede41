"""Forward ops of every backend against `reference`, and independence of rows."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.models.weight_formats import Fp8BlockWeight, Fp8Weight, WeightTensor
from draftproof.ops import Attention, AttentionShape, Ops, resolve
from draftproof.ops.contract.block_scales import SUPER_BLOCK, float_scales, pack_scales
from draftproof.ops.contract.types import QuantizedTable
from draftproof.ops.torch.backend import TorchOps
from draftproof.ops.torch.forward import TorchForward
from opcheck import CPU, POOL, Paged, assert_close, bits, importable, rows_that_differ

OPS = importable()
OTHERS = {name: ops for name, ops in OPS.items() if name != "reference"}
REFERENCE = OPS["reference"]
DTYPES = (torch.float32, torch.bfloat16)
SIZES = (0, 1, 2, 7, 8, 9, 17)

every = pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
others = pytest.mark.parametrize("ops", OTHERS.values(), ids=OTHERS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))


def test_default_backend_is_tested() -> None:
    """Check that the default backend loads, because backends that do not load are skipped above."""
    if "DRAFTPROOF_TEST_BACKENDS" not in os.environ:
        assert {"reference", "torch", resolve("auto", CPU).name} <= set(OPS)


@pytest.mark.parametrize("name", ["reference", "torch", "auto"])
def test_fast_numerics_equal_exact_without_faster_kernels(name: str) -> None:
    exact, fast = resolve(name, CPU), resolve(name, CPU, "fast")
    assert (exact.numerics, fast.numerics) == ("exact", "fast")
    weight, x = randn(53, 72, seed=1), randn(9, 72, seed=2)
    assert torch.equal(
        exact.forward.linear(x, exact.forward.pack_linear(weight)),
        fast.forward.linear(x, fast.forward.pack_linear(weight)),
    )


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turns_for(ops: Ops, large: bool = False) -> dict[str, object]:
    """Return fewer batches for the reference, which is a loop over rows."""
    if ops.name == "reference":
        return {"counts": (2, 9), "turns": 0}
    return {"counts": (2, 7, 8, 9, 16, 17, 33), "turns": 4} if large else {}


# --- linear ---------------------------------------------------------------------------------------------

SHAPES = ((53, 72), (1, 8), (97, 200))  # (N, K): nothing a power of two


@others
@dtypes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", (False, True))
def test_linear_equals_reference(
    ops: Ops, dtype: torch.dtype, shape: tuple[int, int], with_bias: bool
) -> None:
    weight = (randn(*shape, seed=1) / shape[1] ** 0.5).to(dtype)
    bias = randn(shape[0], seed=2, dtype=dtype) if with_bias else None
    packed, want = ops.forward.pack_linear(weight, bias), REFERENCE.forward.pack_linear(weight, bias)
    for rows in SIZES:
        x = randn(rows, shape[1], seed=rows, dtype=dtype)
        assert_close(ops.forward.linear(x, packed), REFERENCE.forward.linear(x, want), dtype)
        logits = ops.forward.linear(x, packed, torch.float32)
        assert_close(logits, REFERENCE.forward.linear(x, want, torch.float32), torch.float32)


# Name, smallest and largest integer, elements of a group (0: one scale per output row), has a minimum.
INTEGERS = (
    ("w8a8", -127, 127, 0, False),
    ("blocks", 0, 15, 32, True),
    ("blocks", -127, 127, 32, False),
    ("blocks", -32, 31, 16, False),
    ("blocks", 0, 31, 16, True),
)
QUANTIZED = (*INTEGERS, ("fp8",), ("fp8_block",), ("w4a16", 32, False), ("w4a16", 0, True), ("mxfp4",))
EXACT_SUMS = {"w8a8": "cpu torch triton", "fp8": "torch", "fp8_block": "torch"}  # backends with equal bits
QUANTIZED_SHAPES = ((53, 96), (1, 32), (130, 160))
every_format = pytest.mark.parametrize("form", QUANTIZED, ids=lambda form: "-".join(map(str, form)))


def quantized(form: tuple[Any, ...], shape: tuple[int, int], bias: bool) -> dict[str, Any]:
    """Return the arguments of `pack_quantized` for a random weight."""
    random = torch.Generator().manual_seed(shape[0])
    name, bias_row, zeros = form[0], randn(shape[0]) if bias else None, None
    if name.startswith("fp8"):
        kind = Fp8Weight if name == "fp8" else Fp8BlockWeight
        weight: WeightTensor = kind.quantize(torch.randn(shape, generator=random) / 16)
        data, scales = weight.data, weight.scales
    elif name == "mxfp4":
        data = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=random, dtype=torch.uint8)
        scales = torch.randint(115, 123, (shape[0], shape[1] // 32), generator=random, dtype=torch.uint8)
    elif name == "w4a16":
        group = form[1] or shape[1]
        scales = torch.rand((shape[0], shape[1] // group), generator=random).to(torch.bfloat16) / 64
        data = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=random, dtype=torch.uint8)
        zeros = torch.randint(0, 16, scales.shape, generator=random, dtype=torch.uint8) if form[2] else None
    else:
        _, low, high, group, has_min = form
        data = torch.randint(low, high + 1, shape, generator=random, dtype=torch.int8)
        sizes = (shape[0], shape[1] // group, 2) if group else shape[:1]
        scales = torch.rand(sizes, generator=random) / 64
        if group == 32:  # exact in fp16, as GGUF stores scales
            scales, data = scales.half(), data.to(torch.uint8 if high == 15 else torch.int8)
        if group and not has_min:
            scales = scales[..., :1].contiguous()
    return {"weight_format": name, "data": data, "scales": scales, "bias": bias_row, "zeros": zeros}


@others
@pytest.mark.parametrize("form", [form for form in INTEGERS if form[0] == "blocks"], ids=str)
def test_scales_in_two_levels_have_the_bits_of_their_products(ops: Ops, form: tuple[Any, ...]) -> None:
    if "blocks" not in ops.forward.weight_formats:
        pytest.skip(f"{ops.name} does not multiply weights in blocks")
    _, low, high, group, has_min = form
    shape, kinds, random = (37, 768), 2 if has_min else 1, torch.Generator().manual_seed(high)
    data = torch.randint(low, high + 1, shape, generator=random, dtype=torch.int8)
    data = data.to(torch.uint8 if high == 15 else torch.int8)
    bases = torch.randn((shape[0], 3, kinds), generator=random).half() / 64
    sizes = (shape[0], 3, SUPER_BLOCK // group, kinds)
    scales = pack_scales(bases, torch.randint(-128, 128, sizes, generator=random, dtype=torch.int8))
    two, one = (
        ops.forward.pack_quantized("blocks", data, part, None) for part in (scales, float_scales(scales))
    )
    for rows in (1, 9):
        x = randn(rows, shape[1], seed=rows, dtype=torch.bfloat16)
        assert bits(ops.forward.linear(x, two)) == bits(ops.forward.linear(x, one))
    tokens = torch.tensor([0, 36, 17])
    tables = (QuantizedTable(packed, shape, torch.float32) for packed in (two, one))
    found, wanted = (ops.forward.embed(tokens, table) for table in tables)
    assert bits(found) == bits(wanted)


@others
@dtypes
@every_format
@pytest.mark.parametrize("shape", QUANTIZED_SHAPES)
def test_quantized_linear_equals_reference(
    ops: Ops, dtype: torch.dtype, form: tuple[Any, ...], shape: tuple[int, int]
) -> None:
    """Compare bits where sums are exact, and values elsewhere."""
    if form[0] not in ops.forward.weight_formats:
        pytest.skip(f"{ops.name} does not multiply {form[0]}")
    for bias, counts in ((False, (0, 1, 9)), (True, (2,))):
        arguments = quantized(form, shape, bias)
        packed, want = (o.forward.pack_quantized(**arguments) for o in (ops, REFERENCE))
        for rows in counts:
            x = randn(rows, shape[1], seed=rows, dtype=dtype)
            x[1:2] = 0
            got, defined = (o.forward.linear(x, p) for o, p in ((ops, packed), (REFERENCE, want)))
            assert_close(got, defined, dtype)
            if ops.name in EXACT_SUMS.get(form[0], "").split():
                wide = [o.forward.linear(x, p, torch.float32) for o, p in ((ops, packed), (REFERENCE, want))]
                assert torch.equal(got, defined) and torch.equal(*wide)


@every
@every_format
def test_rows_of_quantized_linear_are_independent(ops: Ops, form: tuple[Any, ...]) -> None:
    if form[0] not in ops.forward.weight_formats:
        pytest.skip(f"{ops.name} does not multiply {form[0]}")
    packed = ops.forward.pack_quantized(**quantized(form, (70, 64), bias=True))
    pool = randn(POOL, 64, seed=3) * torch.logspace(-3, 3, POOL)[:, None]
    assert not rows_that_differ(lambda rows: ops.forward.linear(pool[rows], packed), **turns_for(ops, True))


@pytest.mark.parametrize(
    "form", [form for form in QUANTIZED if form[0] in ("w8a8", "fp8", "fp8_block")], ids=str
)
def test_activation_scale_of_a_batch_is_detected(form: tuple[Any, ...]) -> None:
    """Negative control: one scale for all rows of a call makes rows depend on each other."""
    ops = TorchOps(CPU)
    packed = ops.forward.pack_quantized(**quantized(form, (20, 64), bias=False))
    pool = randn(POOL, 64, seed=3) * torch.logspace(-3, 3, POOL)[:, None]

    def batch_scale(rows: list[int]) -> Tensor:
        x = pool[rows]
        scale = x.abs().max() / 127
        return ops.forward.linear((x / scale).round() * scale, packed)

    assert rows_that_differ(batch_scale, counts=(2, 9), turns=0)


@every
@dtypes
@pytest.mark.parametrize("shape", ((53, 72), (192, 576), (65, 1536)))
def test_linear_rows_are_independent(ops: Ops, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    packed = ops.forward.pack_linear(randn(*shape, seed=1, dtype=dtype), randn(shape[0], seed=2, dtype=dtype))
    x = randn(POOL, shape[1], seed=3, dtype=dtype)
    turns = turns_for(ops, large=shape[1] > 100)
    for out in (None, torch.float32):
        assert not rows_that_differ(lambda at, out=out: ops.forward.linear(x[at], packed, out), **turns)


def test_control_batch_dependent_linear_is_detected() -> None:
    """Split the sum in two for many rows, as a GEMM library does."""
    weight, x = randn(53, 576, seed=1), randn(POOL, 576, seed=3)

    def library(at: list[int]) -> Tensor:
        if len(at) < 16:
            return torch.stack([weight @ x[i] for i in at])
        return torch.stack([weight[:, :300] @ x[i, :300] + weight[:, 300:] @ x[i, 300:] for i in at])

    wrong = rows_that_differ(library)
    assert len(wrong) > 100
    assert all(int(text.rsplit(" ", 1)[1]) >= 16 for text in wrong)


def test_control_row_leaking_into_the_next_is_detected() -> None:
    x = randn(POOL, 8)

    def leaky(at: list[int]) -> Tensor:
        out = x[at].clone()
        out[-1] += 1e-3 * (len(at) == POOL)
        return out

    assert len(rows_that_differ(leaky, turns=POOL)) == POOL + 1  # each row is last once, one of them twice


# --- embedding, norms, activation -----------------------------------------------------------------------


@others
@dtypes
def test_embed_equals_reference(ops: Ops, dtype: torch.dtype) -> None:
    table = randn(53, 24, dtype=dtype)
    for rows in SIZES:
        tokens = torch.arange(rows) * 7 % 53
        assert torch.equal(ops.forward.embed(tokens, table), REFERENCE.forward.embed(tokens, table))


@others
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_places_of_tokens_in_the_parts_of_a_table(ops: Ops, num_ranks: int) -> None:
    """Looking up every rank's part, then the places, is looking up the whole table."""
    num_rows = -(-50 // num_ranks)
    table = randn(num_rows * num_ranks, 48)
    for count in (1, 5, 300):
        tokens = torch.randint(0, 50, (count,))
        tokens[0], tokens[-1] = 49, 0
        parts = [ops.forward.vocab_places(tokens, num_rows, rank, num_ranks) for rank in range(num_ranks)]
        found = [
            ops.forward.embed(own, part) for (own, _), part in zip(parts, table.chunk(num_ranks), strict=True)
        ]
        assert all(torch.equal(places, parts[0][1]) for _, places in parts)
        assert torch.equal(ops.forward.embed(parts[0][1], torch.cat(found)), table[tokens])


@others
@dtypes
@pytest.mark.parametrize("width", (8, 45, 576))
def test_norms_and_silu_equal_reference(ops: Ops, dtype: torch.dtype, width: int) -> None:
    weight = randn(width, seed=1, dtype=dtype)
    for rows in SIZES:
        x = 3 * randn(rows, width, seed=rows, dtype=dtype)
        residual = randn(rows, width, seed=rows + 1, dtype=dtype)
        assert_close(
            ops.forward.rms_norm(x, weight, 1e-6), REFERENCE.forward.rms_norm(x, weight, 1e-6), dtype
        )
        pairs = torch.cat([x, residual], 1)  # two vectors a row, each with a norm of its own
        normed = [ops.forward.rms_norm(part, weight, 1e-6) for part in (x, residual)]
        assert torch.equal(ops.forward.rms_norm(pairs, weight, 1e-6), torch.cat(normed, 1))
        assert_close(torch.cat(normed, 1), REFERENCE.forward.rms_norm(pairs, weight, 1e-6), dtype)
        got, total = ops.forward.add_rms_norm(x, residual, weight, 1e-5)
        want, summed = REFERENCE.forward.add_rms_norm(x, residual, weight, 1e-5)
        assert_close(got, want, dtype)
        assert torch.equal(total, summed)
        both = 4 * randn(rows, 2 * width, seed=rows, dtype=dtype)
        assert_close(ops.forward.act_mul(both), REFERENCE.forward.act_mul(both), dtype)


@pytest.mark.parametrize("width", (8, 45, 576))
def test_norms_of_an_fp32_residual_equal_reference(width: int) -> None:
    """A residual in fp32 beside activations in bf16 is not rounded; its rows are independent."""
    weight = randn(width, seed=1, dtype=torch.bfloat16)
    for ops in (backend for backend in OPS.values() if backend.forward.table_formats):
        for rows in SIZES:
            x, residual = randn(rows, width, seed=rows, dtype=torch.bfloat16), 3 * randn(rows, width, seed=2)
            got, total = ops.forward.add_rms_norm(x, residual, weight, 1e-5)
            want, summed = REFERENCE.forward.add_rms_norm(x, residual, weight, 1e-5)
            assert total.dtype == torch.float32 and torch.equal(total, x.float() + residual)
            assert torch.equal(total, summed)
            assert_close(got, want, torch.bfloat16)
            normed = ops.forward.rms_norm(total, weight, 1e-5)
            assert normed.dtype == torch.bfloat16 and torch.equal(normed, got)
            for row in range(min(rows, 3)):
                part = slice(row, row + 1)
                alone = ops.forward.add_rms_norm(x[part], residual[part], weight, 1e-5)
                assert torch.equal(alone[0], got[part]) and torch.equal(alone[1], total[part])


@others
def test_rms_norm_of_zeros_and_of_large_values_equals_reference(ops: Ops) -> None:
    x = torch.stack([torch.zeros(24), torch.full((24,), 1e4), torch.full((24,), -1e-6)])
    ones = torch.ones(24)
    assert_close(
        ops.forward.rms_norm(x, ones, 1e-6), REFERENCE.forward.rms_norm(x, ones, 1e-6), torch.float32
    )


@others
def test_silu_at_extreme_values_equals_reference(ops: Ops) -> None:
    gate = torch.tensor(
        [-1e30, -1e4, -200.0, -88.0, -30.0, -0.0, 0.0, 30.0, 88.0, 200.0, 1e4, 1e30, 1.0, -1.0]
    )
    both = torch.cat([gate, torch.ones_like(gate)])[None]
    assert_close(ops.forward.act_mul(both), REFERENCE.forward.act_mul(both), torch.float32)


@every
@dtypes
@pytest.mark.parametrize("width", (24, 45, 576))
def test_norm_rows_are_independent(ops: Ops, dtype: torch.dtype, width: int) -> None:
    weight = randn(width, seed=1, dtype=dtype)
    x, residual = randn(POOL, width, seed=2, dtype=dtype), randn(POOL, width, seed=3, dtype=dtype)
    both = randn(POOL, 2 * width, seed=4, dtype=dtype)
    for call in (
        lambda at: ops.forward.rms_norm(x[at], weight, 1e-6),
        lambda at: torch.cat(ops.forward.add_rms_norm(x[at], residual[at], weight, 1e-6), dim=1),
        lambda at: ops.forward.act_mul(both[at]),
        lambda at: ops.forward.embed(torch.tensor(at), x),
    ):
        assert not rows_that_differ(call, **turns_for(ops, large=width > 24))


# --- rope and attention ---------------------------------------------------------------------------------

HEADS = {
    "grouped": AttentionShape(num_q=6, num_kv=2, dim=16, scale=0.25, window=0),
    "one_kv": AttentionShape(num_q=3, num_kv=1, dim=8, scale=0.4, window=0),
    "full": AttentionShape(num_q=2, num_kv=2, dim=64, scale=0.125, window=0),
    "window": AttentionShape(num_q=4, num_kv=2, dim=8, scale=0.35, window=9),
    "long_window": AttentionShape(num_q=2, num_kv=1, dim=16, scale=0.25, window=70),
    "smollm2": AttentionShape(num_q=9, num_kv=3, dim=64, scale=0.125, window=0),
    "qwen3": AttentionShape(num_q=4, num_kv=1, dim=128, scale=0.09, window=0),
}
LENGTHS = [1, 5, 33, 132, 64, 65]
heads_kinds = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)


def rope(heads: AttentionShape, length: int = 160) -> Tensor:
    angles = torch.arange(length)[:, None] / 10.0 ** torch.arange(heads.dim // 2)[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@others
@dtypes
@heads_kinds
@pytest.mark.parametrize("norm", (False, True))
def test_rope_store_equals_reference(ops: Ops, dtype: torch.dtype, heads: AttentionShape, norm: bool) -> None:
    width = (heads.num_q + 2 * heads.num_kv) * heads.dim
    weights = [randn(heads.dim, seed=i, dtype=dtype) for i in (1, 2)] if norm else [None, None]
    for where in ([], [(2, 32)], [(0, 0), (3, 17), (3, 18), (3, 19), (4, 63), (5, 2)]):
        caches, attention = [], Attention(heads, None, None, *weights)
        qkv = randn(len(where), width, seed=3, dtype=dtype)
        for backend in (ops, REFERENCE):
            paged = Paged(heads, LENGTHS, dtype)
            paged.cache.zero_()
            q = backend.forward.rope_store(qkv, paged.rows(where), attention, rope(heads), paged.cache, 1e-6)
            caches.append((q, paged.cache))
        assert_close(caches[0][0], caches[1][0], dtype)
        assert_close(caches[0][1], caches[1][1], dtype)
        assert torch.equal(caches[0][1][1], caches[1][1][1]), "v is stored as it is"


@others
@dtypes
@heads_kinds
def test_attention_equals_reference(ops: Ops, dtype: torch.dtype, heads: AttentionShape) -> None:
    """Use ragged slots, pages out of order, and NaN at every position that no row may read."""
    paged = Paged(heads, LENGTHS, dtype)
    for where in (
        [],
        [(0, 0)],
        [(3, 131)],
        [(s, n - 1) for s, n in enumerate(LENGTHS)],
        [(5, 64), (1, 4), *((3, p) for p in range(122, 132)), (0, 0)],
        [(4, p) for p in range(64)],
    ):
        q = randn(len(where), heads.num_q * heads.dim, seed=7, dtype=dtype)
        rows = paged.rows(where)
        assert_close(
            ops.forward.attention(q, rows, heads, paged.cache),
            REFERENCE.forward.attention(q, rows, heads, paged.cache),
            dtype,
        )


@others
@dtypes
@pytest.mark.parametrize("page_size", (8, 16, 64))
@pytest.mark.parametrize("window", (0, 300))
def test_attention_at_late_positions_equals_reference(
    ops: Ops, dtype: torch.dtype, page_size: int, window: int
) -> None:
    """Compare positions beyond every block and split, for each page size, with the reference.

    A verify window there has the bits of its rows computed one by one.
    """
    heads = AttentionShape(num_q=4, num_kv=2, dim=64, scale=0.125, window=window)
    paged = Paged(heads, [700, 3, 517], dtype, page_size)
    where = [(0, p) for p in range(693, 700)] + [(1, 2)] + [(2, p) for p in range(510, 517)]
    q = randn(len(where), heads.num_q * heads.dim, seed=7, dtype=dtype)
    got = ops.forward.attention(q, paged.rows(where), heads, paged.cache)
    some = [0, 6, 7, 8, 14]
    rows = paged.rows([where[i] for i in some])
    assert_close(got[some], REFERENCE.forward.attention(q[some], rows, heads, paged.cache), dtype)
    for i, at in enumerate(where):
        alone = ops.forward.attention(q[i : i + 1], paged.rows([at]), heads, paged.cache)
        assert bits(alone[0]) == bits(got[i]), at


def test_control_window_off_by_one_is_detected() -> None:
    heads = HEADS["window"]
    wider = AttentionShape(heads.num_q, heads.num_kv, heads.dim, heads.scale, heads.window + 1)
    paged = Paged(heads, LENGTHS, torch.float32)
    q, rows = randn(1, heads.num_q * heads.dim), paged.rows([(3, 100)])
    with pytest.raises(AssertionError):
        assert_close(
            REFERENCE.forward.attention(q, rows, wider, paged.cache),
            REFERENCE.forward.attention(q, rows, heads, paged.cache),
            torch.float32,
        )


def attention_calls(ops: Ops, heads: AttentionShape, dtype: torch.dtype) -> list[str]:
    """Compute each row alone, in 2 and 9 verify rows, in chunks of every kind, and among other slots."""
    paged = Paged(heads, LENGTHS, dtype)
    q = {at: randn(heads.num_q * heads.dim, seed=i, dtype=dtype) for i, at in enumerate(paged.pool)}

    def run(where: list[tuple[int, int]]) -> list[bytes]:
        if not where:
            return []
        x = torch.stack([q[at] for at in where])
        out = ops.forward.attention(x, paged.rows(where), heads, paged.cache)
        return [bits(row) for row in out]

    watched = [(s, p) for s, n in enumerate(LENGTHS) for p in {0, 8, 63, 64, 127, n - 1} if p < n]
    alone = {at: run([at])[0] for at in watched}
    batches = [[at for at in paged.pool if at[0] == s] for s in range(len(LENGTHS))]  # whole prefills
    batches += [[(s, p) for s in (4, 0, 3) for p in range(LENGTHS[s])], watched, watched[::-1]]
    for s, p in watched:
        for count in (2, 9):
            for before in (0, count - 1):
                line = [(s, i) for i in range(p - before, p - before + count) if 0 <= i < LENGTHS[s]]
                batches.append([(1, 2), *line, (2, 30)] if s not in (1, 2) else line)
    wrong = []
    for batch in batches:
        if batch == watched or batch == watched[::-1]:  # slots keep their rows adjacent and ascending
            batch = sorted(batch, key=lambda at, b=batch: ([a[0] for a in b].index(at[0]), at[1]))
        for at, got in zip(batch, run(batch), strict=True):
            if at in alone and got != alone[at]:
                wrong.append(f"{at} among {len(batch)}")
    return wrong


# Slow backends compute all shapes with one function, which `test_attention_equals_reference` checks for each.
FEW_HEADS = ("grouped", "window", "long_window", "smollm2")


@dtypes
@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for n, s in product(OTHERS, HEADS) if n == "cpu" or s in FEW_HEADS]
)
def test_attention_rows_are_independent(name: str, shape: str, dtype: torch.dtype) -> None:
    assert not attention_calls(OTHERS[name], HEADS[shape], dtype)


def test_control_attention_order_by_longest_row_is_detected() -> None:
    """Count blocks back from the longest row of a call, which moves the order of a row's sum."""

    class Moving(TorchForward):
        def attention(self, q: Tensor, rows, heads: AttentionShape, cache: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            out, last = [], int(rows.positions.max())
            for r, (slot, p) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
                at = torch.arange(p + 1)
                index = rows.page_table[slot, at // 8].long() * 8 + at % 8
                k, v = cache.view(2, -1, heads.num_kv, heads.dim)[:, index].float()
                query = q[r].view(heads.num_kv, -1, heads.dim).float()
                weights = torch.softmax(torch.einsum("hgd,nhd->hgn", query, k) * heads.scale, -1)
                first = last % 64
                parts = [
                    torch.einsum("hgn,nhd->hgd", weights[..., a], v[a])
                    for a in (slice(0, first), slice(first, None))
                ]
                out.append((parts[0] + parts[1]).reshape(-1).to(q.dtype))
            return torch.stack(out)

    ops = TorchOps(CPU)
    ops.forward = Moving()
    assert attention_calls(ops, HEADS["grouped"], torch.float32)


@every
@dtypes
@pytest.mark.parametrize("name", ("grouped", "one_kv", "smollm2"))
def test_rope_store_rows_are_independent(ops: Ops, dtype: torch.dtype, name: str) -> None:
    heads = HEADS[name]
    qkv = randn(POOL, (heads.num_q + 2 * heads.num_kv) * heads.dim, dtype=dtype)
    attention = Attention(heads, None, None, *(randn(heads.dim, seed=i, dtype=dtype) for i in (1, 2)))
    table = rope(heads)

    def call(at: list[int]) -> Tensor:
        paged = Paged(heads, [1] * POOL, dtype)
        rows = paged.rows([(i, 0) for i in at])
        rows.positions[:] = torch.tensor(at)
        q = ops.forward.rope_store(qkv[at], rows, attention, table, paged.cache, 1e-6)
        stored = paged.cache.view(2, -1, heads.num_kv * heads.dim)[:, rows.kv_index]
        return torch.cat([q, stored[0], stored[1]], dim=1)

    limit = {"counts": (2, 9, 17, 33), "turns": 3}
    assert not rows_that_differ(call, **(turns_for(ops) or limit))
