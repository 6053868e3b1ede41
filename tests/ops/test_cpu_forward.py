"""GEMM and attention of the cpu backend with every kind of kernel; `test_forward` has the other ops."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from llvmlite import binding, ir
from torch import Tensor

from draftproof.ops import AttentionShape, resolve

pytest.importorskip("numba")

from cpu_cases import CPU, KINDS, PAGE, close, make, poison, rand, same
from draftproof.models.weight_formats import Int4GroupWeight, pack_weight
from draftproof.ops.cpu.backend import CpuOps
from draftproof.ops.cpu.gemm import block_dot, blocks, byte_dot, decoded, fma, w8a8
from draftproof.ops.cpu.gemm.block_dot import SCALE_BYTES, BlockLayout
from draftproof.ops.cpu.gemm.byte_dot import NeonDot, VnniDot, WideDot, select_dot
from draftproof.ops.cpu.gemm.weight_format import PackedLinear
from draftproof.ops.cpu.jit import amx
from draftproof.ops.cpu.jit.compile import _closure_key
from opcheck import Paged


@pytest.fixture(scope="module", params=KINDS)
def backend(request: Any) -> tuple[CpuOps, torch.dtype]:
    return make(request.param)


# --- linear ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns,depth", [(97, 48), (259, 32), (64, 64), (33, 7), (960, 576), (17, 100), (1, 1)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_correct_and_rows_are_independent(
    backend: tuple[CpuOps, torch.dtype], columns: int, depth: int, bias: bool
) -> None:
    ops, dtype = backend
    weight = rand(columns, depth, dtype=dtype, seed=1)
    offset = rand(columns, dtype=dtype, seed=2) if bias else None
    packed = ops.forward.pack_linear(weight, offset)
    x = rand(70, depth, dtype=dtype, seed=3)
    whole = ops.forward.linear(x, packed, torch.float32)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    # the products of bf16 are exact, so both types have the error of a sum in fp32
    assert (whole.double() - exact).abs().max() < depth**0.5 * 1e-5
    rounded = ops.forward.linear(x, packed)
    assert same(rounded, whole.to(dtype))
    poison(ops)
    alone = torch.cat([ops.forward.linear(x[i : i + 1], packed, torch.float32) for i in range(70)])
    assert same(alone, whole)
    for count in (2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 65):
        start = 70 - count
        assert same(ops.forward.linear(x[start:], packed, torch.float32), whole[start:])


def test_linear_of_many_rows_equals_single_rows(backend: tuple[CpuOps, torch.dtype]) -> None:
    ops, dtype = backend
    packed = ops.forward.pack_linear(rand(100, 64, dtype=dtype))
    x = rand(300, 64, dtype=dtype, seed=1)
    whole = ops.forward.linear(x, packed)
    for start, end in ((0, 1), (127, 130), (255, 257), (299, 300)):
        assert same(ops.forward.linear(x[start:end], packed), whole[start:end])


def test_linear_ignores_nan_in_other_rows(backend: tuple[CpuOps, torch.dtype]) -> None:
    ops, dtype = backend
    packed = ops.forward.pack_linear(rand(64, 40, dtype=dtype))
    x = rand(20, 40, dtype=dtype, seed=1)
    good = ops.forward.linear(x, packed)
    x[3] = float("nan")
    x[17] = float("inf")
    rest = [i for i in range(20) if i not in (3, 17)]
    assert same(ops.forward.linear(x, packed)[rest], good[rest])


# --- attention ------------------------------------------------------------------------------------


HEADS = [
    AttentionShape(9, 3, 64, 0.125, 0),
    AttentionShape(4, 2, 8, 0.35, 0),
    AttentionShape(2, 2, 16, 0.25, 20),
    AttentionShape(8, 1, 32, 0.2, 150),
    AttentionShape(2, 1, 128, 0.09, 0),
    AttentionShape(4, 4, 24, 0.2, 0),
]


@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_correct_and_rows_are_independent(
    backend: tuple[CpuOps, torch.dtype], heads: AttentionShape
) -> None:
    ops, dtype = backend
    paged = Paged(heads, [300, 70, 1, 129], dtype, PAGE)
    places = [(0, p) for p in range(100, 165)] + [(1, p) for p in range(70)] + [(2, 0)]
    places += [(3, p) for p in (126, 127, 128)] + [(0, 299)]
    q = rand(len(places), heads.num_q * heads.dim, dtype=dtype, seed=9)
    whole = ops.forward.attention(q, paged.rows(places), heads, paged.cache)
    some = list(range(0, len(places), 6)) + [135, 139]
    rows = paged.rows([places[i] for i in some])
    close(whole[some], resolve("reference", CPU).forward.attention(q[some], rows, heads, paged.cache), dtype)
    for i in [0, 1, 27, 28, 64, 65, 100, 134, 135, 136, 137, 138, 139]:
        poison(ops)
        alone = ops.forward.attention(q[i : i + 1], paged.rows(places[i : i + 1]), heads, paged.cache)
        assert same(alone, whole[i : i + 1]), i
    for start, end in ((3, 11), (60, 70), (130, 140)):
        part = ops.forward.attention(q[start:end], paged.rows(places[start:end]), heads, paged.cache)
        assert same(part, whole[start:end])


@pytest.mark.parametrize("dim", (32, 48, 64))
def test_attention_has_the_same_bits_for_every_page_size(
    backend: tuple[CpuOps, torch.dtype], dim: int
) -> None:
    """Keys are transposed 8 or 16 at a time, by page size and head dimension."""
    ops, dtype = backend
    heads, lengths = AttentionShape(6, 2, dim, 0.2, 0), [200, 1, 70]
    first = Paged(heads, lengths, dtype, page_size=8)
    where = [(0, p) for p in (0, 15, 16, 63, 64, 127, 199)] + [(1, 0), (2, 69)]
    q = rand(len(where), heads.num_q * dim, dtype=dtype, seed=4)
    want = ops.forward.attention(q, first.rows(where), heads, first.cache)
    for page_size in (16, 24, 48, 64):
        other = Paged(heads, lengths, dtype, page_size)
        for slot, p in first.pool:
            a, b = first.place(slot, p), other.place(slot, p)
            other.cache[:, b // page_size, b % page_size] = first.cache[:, a // 8, a % 8]
        assert same(ops.forward.attention(q, other.rows(where), heads, other.cache), want), page_size


def test_attention_ignores_keys_beyond_the_row(backend: tuple[CpuOps, torch.dtype]) -> None:
    """Rows 40..45 of one request together, with NaN stored by the rows after row 42."""
    ops, dtype = backend
    heads = HEADS[0]
    paged = Paged(heads, [46], dtype, PAGE)
    places = [(0, p) for p in range(40, 46)]
    q = rand(6, heads.num_q * heads.dim, dtype=dtype)
    good = ops.forward.attention(q, paged.rows(places), heads, paged.cache)
    for position in (43, 44, 45):
        paged.cache[:, int(paged.page_table[0, position // PAGE]), position % PAGE] = float("nan")
    assert same(ops.forward.attention(q, paged.rows(places), heads, paged.cache)[:3], good[:3])


def test_attention_returns_nan_for_rows_with_visible_nan(backend: tuple[CpuOps, torch.dtype]) -> None:
    """NaN in V at keys 3 and 30; with a window of 20, rows see the first, none, or the second."""
    ops, dtype = backend
    heads = HEADS[2]
    paged = Paged(heads, [60], dtype, PAGE)
    for position in (3, 30):
        paged.cache[1, int(paged.page_table[0, position // PAGE]), position % PAGE] = float("nan")
    places = [(0, p) for p in range(60)]
    q = rand(60, heads.num_q * heads.dim, dtype=dtype)
    got = ops.forward.attention(q, paged.rows(places), heads, paged.cache)
    sees_nan = [any(p - 19 <= bad <= p for bad in (3, 30)) for p in range(60)]
    assert got.isnan().all(1).tolist() == sees_nan and got.isnan().any(1).tolist() == sees_nan
    for i in range(60):
        alone = ops.forward.attention(q[i : i + 1], paged.rows(places[i : i + 1]), heads, paged.cache)
        assert same(alone.nan_to_num(7.0), got[i : i + 1].nan_to_num(7.0))


@pytest.mark.parametrize("kind", ["bf16", "amx"])
@pytest.mark.parametrize(("columns", "depth"), [(61, 40), (64, 64), (200, 130), (97, 576)])
def test_int8_draft_weights_are_close_and_rows_are_independent(columns: int, depth: int, kind: str) -> None:
    """Compare with int8 in fp64, which is the definition, and with bf16."""
    if kind == "amx" and not amx.takes_bytes():
        pytest.skip("needs AMX with int8")
    ops, dtype = make(kind, 2)
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn((columns, depth), generator=generator).to(dtype)
    weight[3] = 0
    x = torch.randn((70, depth), generator=generator).to(dtype)
    x[5], x[7] = 0, 100 * x[7]
    rough = ops.forward.pack_draft_linear(weight)
    found = ops.forward.linear(x, rough, torch.float32)
    bias = torch.randn(columns, generator=generator).to(dtype)
    assert same(
        ops.forward.linear(x, ops.forward.pack_draft_linear(weight, bias), torch.float32), found + bias
    )

    def in_bytes(rows: Tensor) -> Tensor:
        scale = rows.double().abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        return (rows.double() / scale).round() * scale

    expected = in_bytes(x) @ in_bytes(weight).T
    size = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    off = (found - expected).abs() / size.clamp(min=1e-9)
    assert off.max() < 5e-3 and off.median() < 1e-6  # a byte here and there is rounded the other way
    assert ((found - x.double() @ weight.double().T).abs() <= 0.02 * size + 1e-6).all()
    assert (found[5] == 0).all() and (found[:, 3] == 0).all()
    poison(ops)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(30, 70)):
        assert same(ops.forward.linear(x[rows], rough, torch.float32), found[rows])
    assert same(make(kind, 3)[0].forward.linear(x, rough, torch.float32), found)
    assert same(ops.forward.linear(x, rough), found.to(dtype))


@pytest.mark.parametrize(
    "call",
    [
        lambda ops: ops.forward.linear(rand(2, 9), ops.forward.pack_linear(rand(5, 8))),
        lambda ops: ops.forward.linear(rand(2, 8).bfloat16(), ops.forward.pack_linear(rand(5, 8))),
        lambda ops: ops.forward.rms_norm(rand(2, 8), rand(9), 1e-5),
        lambda ops: ops.sampling.argmax(rand(2, 8).bfloat16()),
        lambda ops: ops.sampling.top(rand(2, 8), 9),
    ],
)
def test_wrong_shapes_and_dtypes_are_rejected(call: Any) -> None:
    with pytest.raises(ValueError):
        call(make("fp32")[0])


class WideDotOfTwoTiles(WideDot):
    """Emission for tiles of 8 and 5 rows alone, those of 13 rows: the others take seconds to compile."""

    name = "wide_8_5"  # of kernels in the disk cache
    tiles = (8, 5)

    @classmethod
    def emit_row_counts(cls, builder: Any, rows: Any, emit: Any) -> None:
        for count in cls.tiles:
            with builder.if_then(builder.icmp_signed("==", rows, ir.IntType(64)(count))):
                emit(count)


@pytest.mark.slow
@pytest.mark.parametrize("low", (0, -8))
def test_quantized_linear_without_the_dot_product_instruction_has_the_same_bits(
    low: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, dtype = make("bf16")
    random = torch.Generator().manual_seed(1)
    data = torch.randint(low, low + 16, (97, 64), generator=random, dtype=torch.int8)
    x = rand(sum(WideDotOfTwoTiles.tiles), 64, dtype=dtype, seed=2)
    scales, factors = rand(97).abs(), rand(97, 2, 2)
    found = []
    for choose in (select_dot, lambda has_signed_weights: WideDotOfTwoTiles()):
        for form in (w8a8, blocks):
            monkeypatch.setattr(form, "select_dot", choose)
        rows = ops.forward.pack_quantized("w8a8", data, scales, None)
        groups = ops.forward.pack_quantized("blocks", data, factors, None)
        found.append([ops.forward.linear(x, packed) for packed in (rows, groups)])
        for emission in (byte_dot, block_dot):
            monkeypatch.setattr(emission, "emit_row_counts", WideDotOfTwoTiles.emit_row_counts)
    assert all(same(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("has_signed_weights", (False, True))
def test_vnni_instruction_multiplies_unsigned_weights_by_signed_rows(has_signed_weights: bool) -> None:
    """Compile for x86; the values are compared on machines with the instruction by the test above."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    dot, module = VnniDot(has_signed_weights), ir.Module()
    module.triple = "x86_64-unknown-linux-gnu"
    kind = ir.FunctionType(dot.sums, [dot.sums, dot.products, ir.IntType(64)])
    function = ir.Function(module, kind, "add")
    builder = ir.IRBuilder(function.append_basic_block())
    total, products, row = function.args
    weights, words = dot.weights(builder, products), dot.row(builder, row, 1)
    total, correction = dot.add(builder, total, weights, words[0]), dot.correction(builder, [weights])
    builder.ret(total if correction is None else builder.add(total, correction))
    target = binding.Target.from_triple(module.triple).create_target_machine(cpu="cascadelake")
    text = target.emit_assembly(binding.parse_assembly(str(module)))
    assert text.count("vpdpbusd") == (2 if has_signed_weights else 1)
    if not has_signed_weights:  # the signed operand comes first in this notation
        assert "vpdpbusd\t(%rdi){1to16}, %zmm1, %zmm0" in text


def test_kernels_of_all_block_layouts_have_keys_of_their_own() -> None:
    switch = (False, True)
    dots = NeonDot(), WideDot(), VnniDot(False), VnniDot(True)
    made = [
        blocks.make_linear(BlockLayout(*values, dot.width), out_bf16, dot)
        for *values, dot, out_bf16 in product(switch, (16, 32), switch, SCALE_BYTES, dots, switch)
    ]
    assert len({_closure_key(kernel.fn) for kernel in made}) == len(made) == 192


def test_kernels_of_all_decoded_formats_have_keys_of_their_own() -> None:
    cases = list(product(decoded.FORMATS, (False, True)))
    assert len({_closure_key(decoded.make_linear(*case).fn) for case in cases}) == len(cases)
    cases = [case for case in cases if case[0] != "mxfp4"]  # its rows are those of `w4a16`
    assert len({_closure_key(decoded.quantize_rows(*case).fn) for case in cases}) == len(cases)


def test_rows_are_rounded_to_e4m3_as_torch_does() -> None:
    ops, _ = make("bf16")
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(bits.isfinite() & (bits.abs() <= 448), bits, 0)[None].clone()
    x[:, 0] = 448  # so that the scale is 1
    packed = ops.forward.pack_quantized(
        "fp8", torch.zeros(1, 65536).to(torch.float8_e4m3fn), torch.ones(1), None
    )
    values, scales = ops.forward._quantize_rows(x, packed)
    assert torch.equal(values.view(torch.float32), x.to(torch.float8_e4m3fn).float())
    assert scales.tolist() == [[1.0]]


def test_every_e4m3_number_is_decoded() -> None:
    ops, _ = make("fp32")
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F].view(torch.float8_e4m3fn)  # [254]
    packed = ops.forward.pack_quantized("fp8", numbers[:, None].contiguous(), torch.ones(254), None)
    assert torch.equal(ops.forward.linear(torch.full((1, 1), 448.0), packed)[0], numbers.float() * 448)


@pytest.mark.parametrize("has_zeros", [False, True])
def test_4_bit_weight_has_the_bits_of_its_dequantised_form(has_zeros: bool) -> None:
    ops, dtype = make("bf16")
    weight = Int4GroupWeight.quantize(rand(70, 320))
    assert weight.scales is not None
    if has_zeros:
        zeros = torch.arange(weight.scales.numel()).view_as(weight.scales) % 16
        weight = Int4GroupWeight.create(weight.integers(), weight.scales.half(), zeros)
    x, dense = rand(9, 320, dtype=dtype, seed=2), PackedLinear(
        "fma", fma.pack_panels(weight.dequantize()), None, 70, 320, dtype
    )  # fmt: skip
    for out in (None, torch.float32):
        assert same(*(ops.forward.linear(x, packed, out) for packed in (pack_weight(ops, weight), dense)))
