"""Dot products of int8 rows: C [rows, columns] int32 = A [rows, 4 steps] x B [steps, columns, 4].

The sums are integers, so their order and the instructions that compute them do not affect the result.
Columns are stored in strips, as many as one vector of sums has lanes. Rows are stored in tiles of up to
`TILE_ROWS`: chunk of K by chunk, and row by row inside a chunk, so that a loop reads both in order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from llvmlite import binding, ir
from numba.core import cgutils, config

from draftproof.ops.cpu.jit.compile import (
    F32,
    I8,
    I16,
    I32,
    I64,
    PTR,
    device,
    emit_prefetch,
    i64,
    llvm,
    op,
    void,
)
from draftproof.ops.cpu.jit.simd import load_value, splat_value

UNIT_COLUMNS = 16  # columns of a unit of work: whole strips
GROUP = 4  # consecutive k of a column, multiplied by one instruction
CHUNK = 16  # k of a row that are stored together in a tile of int8 rows
TILE_ROWS = 8  # rows that share a pass over the weights
PREFETCH_BYTES = 8192  # ahead in B
# LLVM reports no feature for some of these, but selects their instructions by name
DOT_PRODUCT_CPUS = ("neoverse-", "apple-m", "ampere1", "cortex-a76", "cortex-a78", "cortex-x")


@device
def tile_index(row: int, rows: int, chunk: int, chunks: int) -> int:
    """Return the index of a chunk of a row, counted in chunks, among `rows` rows stored in tiles."""
    first = row // TILE_ROWS * TILE_ROWS
    return first * chunks + chunk * min(TILE_ROWS, rows - first) + row - first


class Dot(Protocol):
    """Emission of dot products by the instructions of a machine."""

    name: str
    width: int  # columns of a vector of sums
    row_offset: int  # added to each byte of a quantised row
    interleave: int  # rows whose chains of sums are emitted side by side
    sums: ir.VectorType
    products: ir.VectorType  # bytes of one step

    def weights(self, builder: Any, products: Any) -> Any:
        """Emit the operand of `add` for the bytes of one step."""

    def row(self, builder: Any, addr: Any, steps: int) -> list[Any]:
        """Emit the operands of `add` for so many steps of a row."""

    def add(self, builder: Any, total: Any, weights: Any, row: Any) -> Any:
        """Emit sums plus products."""

    def correction(self, builder: Any, weights: list[Any]) -> Any:
        """Emit what has to be added once to the sums over these steps, for every row; None: nothing."""

    def small_zero(self) -> ir.Constant:
        """Return the start of sums for `small_to_float`."""

    def small_to_float(self, builder: Any, total: Any) -> Any:
        """Emit sums that started at `small_zero` and are below 2^22 in magnitude as fp32."""


@cache
def has_dot_product() -> bool:
    """Return whether this machine has the NEON instruction for four products of bytes."""
    if not binding.get_default_triple().startswith(("aarch64", "arm64")):
        return False
    known = binding.get_host_cpu_name().startswith(DOT_PRODUCT_CPUS)
    return known or bool(binding.get_host_cpu_features().get("dotprod"))


def has_vnni() -> bool:
    """Return whether kernels may use the AVX-512 instruction for four products of bytes."""
    is_restricted = config.CPU_NAME is not None or config.CPU_FEATURES is not None  # to another target
    return not is_restricted and bool(binding.get_host_cpu_features().get("avx512vnni"))


class NeonDot:
    """Emission of sums in vectors of 4 columns, by the instruction `sdot` with a lane of a row."""

    name, width, row_offset, interleave = "neon", 4, 0, 2
    sums, products = ir.VectorType(I32, 4), ir.VectorType(I8, 16)
    # 1.5 * 2^23 as fp32: integers added to its bits are units of the float. The instruction that converts
    # integers costs as much as four others.
    _offset_bits, _offset = 0x4B400000, 12582912.0

    def weights(self, builder: Any, products: Any) -> Any:
        return products

    def row(self, builder: Any, addr: Any, steps: int) -> list[Any]:
        undefined, found = ir.Constant(self.sums, ir.Undefined), []
        for step in range(steps):
            if step % 4 == 0:
                words = load_value(builder, builder.add(addr, I64(GROUP * step)), self.sums)
            lane = ir.Constant(self.sums, [step % 4] * 4)
            found.append(builder.bitcast(builder.shuffle_vector(words, undefined, lane), self.products))
        return found

    def add(self, builder: Any, total: Any, weights: Any, row: Any) -> Any:
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        return llvm(name, self.sums, [self.sums, self.products, self.products])(
            builder, [total, weights, row]
        )

    def correction(self, builder: Any, weights: list[Any]) -> Any:
        return None

    def small_zero(self) -> ir.Constant:
        return ir.Constant(self.sums, [self._offset_bits] * 4)

    def small_to_float(self, builder: Any, total: Any) -> Any:
        floats = ir.VectorType(F32, 4)
        return builder.fsub(builder.bitcast(total, floats), ir.Constant(floats, [self._offset] * 4))


class WideDot:
    """Emission of sums in vectors of 16 columns, by products of 16-bit integers added in pairs.

    Bytes 0 and 2 of each column, then 1 and 3, become 16-bit integers. LLVM selects `vpmaddwd` for the
    products on x86.
    """

    name, width, row_offset, interleave = "wide", 16, 0, 2
    sums, products, halves = ir.VectorType(I32, 16), ir.VectorType(I8, 64), ir.VectorType(I16, 32)

    def _split(self, builder: Any, halves: Any) -> tuple[Any, Any]:
        eight = ir.Constant(self.halves, [8] * 32)
        return builder.ashr(builder.shl(halves, eight), eight), builder.ashr(halves, eight)

    def weights(self, builder: Any, products: Any) -> Any:
        return self._split(builder, builder.bitcast(products, self.halves))

    def row(self, builder: Any, addr: Any, steps: int) -> list[Any]:
        found = []
        for step in range(steps):
            where = builder.inttoptr(builder.add(addr, I64(GROUP * step)), PTR)
            word = splat_value(builder, builder.load(where, typ=I32, align=1), self.sums)
            found.append(self._split(builder, builder.bitcast(word, self.halves)))
        return found

    def add(self, builder: Any, total: Any, weights: Any, row: Any) -> Any:
        wide = ir.VectorType(I32, 32)
        for w, x in zip(weights, row, strict=True):
            products = builder.mul(builder.sext(w, wide), builder.sext(x, wide))
            parts = [
                builder.shuffle_vector(
                    products,
                    ir.Constant(wide, ir.Undefined),
                    ir.Constant(ir.VectorType(I32, 16), list(range(first, 32, 2))),
                )
                for first in (0, 1)
            ]
            total = builder.add(total, builder.add(*parts))
        return total

    def correction(self, builder: Any, weights: list[Any]) -> Any:
        return None

    def small_zero(self) -> ir.Constant:
        return ir.Constant(self.sums, [0] * 16)

    def small_to_float(self, builder: Any, total: Any) -> Any:
        return builder.sitofp(total, ir.VectorType(F32, 16))


class VnniDot:
    """Emission of sums in vectors of 16 columns, by the AVX-512 instruction `vpdpbusd`.

    The instruction multiplies unsigned by signed bytes. Beside signed weights the bytes of a row are stored
    with 128 added, and 128 times the weights are subtracted again: one correction for all rows.
    """

    width, interleave = 16, 4
    sums, products = ir.VectorType(I32, 16), ir.VectorType(I8, 64)
    _offset = ir.Constant(sums, [0x80808080 - 2**32] * 16)  # 128 in every byte

    def __init__(self, has_signed_weights: bool) -> None:
        self.row_offset = 128 if has_signed_weights else 0
        self.name = "vnni_signed" if has_signed_weights else "vnni"

    def _multiply(self, builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
        name = "llvm.x86.avx512.vpdpbusd.512"
        return llvm(name, self.sums, [self.sums] * 3)(builder, [total, unsigned, signed])

    def weights(self, builder: Any, products: Any) -> Any:
        return builder.bitcast(products, self.sums)

    def row(self, builder: Any, addr: Any, steps: int) -> list[Any]:
        places = [builder.inttoptr(builder.add(addr, I64(GROUP * step)), PTR) for step in range(steps)]
        return [splat_value(builder, builder.load(where, typ=I32, align=1), self.sums) for where in places]

    def add(self, builder: Any, total: Any, weights: Any, row: Any) -> Any:
        unsigned, signed = (row, weights) if self.row_offset else (weights, row)
        return self._multiply(builder, total, unsigned, signed)

    def correction(self, builder: Any, weights: list[Any]) -> Any:
        if not self.row_offset:
            return None
        total: Any = self.small_zero()
        for weight in weights:
            total = self._multiply(builder, total, self._offset, weight)
        return builder.sub(self.small_zero(), total)

    def small_zero(self) -> ir.Constant:
        return ir.Constant(self.sums, [0] * 16)

    def small_to_float(self, builder: Any, total: Any) -> Any:
        return builder.sitofp(total, ir.VectorType(F32, 16))


@cache
def select_dot(has_signed_weights: bool) -> Dot:
    """Return the dot products of this machine; all machines of a kind store the same strips."""
    if has_dot_product():
        return NeonDot()
    return VnniDot(has_signed_weights) if has_vnni() else WideDot()


def emit_prefetches(builder: Any, addr: Any, size: int) -> None:
    """Emit prefetches of the weights that follow `size` bytes at an address."""
    for line in range(0, size, 64):
        emit_prefetch(builder, builder.inttoptr(builder.add(addr, I64(PREFETCH_BYTES + line)), PTR))


def emit_row_counts(builder: Any, rows: Any, emit: Callable[[int], None]) -> None:
    """Emit a branch to code of its own for each number of rows of a tile."""
    done = builder.append_basic_block("done")
    switch = builder.switch(rows, done)
    for count in range(1, TILE_ROWS + 1):
        case = builder.append_basic_block(f"rows_{count}")
        switch.add_case(I64(count), case)
        builder.position_at_end(case)
        emit(count)
        builder.branch(done)
    builder.position_at_end(done)


def emit_chains(builder: Any, rows: int, vector: Any, steps: Any, c: Any, body: Callable[..., Any]) -> None:
    """Emit c [rows, UNIT_COLUMNS] = sums over `steps`; `body(index, totals)` emits one step."""
    slots = [cgutils.alloca_once(builder, vector) for _ in range(rows)]
    for slot in slots:
        builder.store(ir.Constant(vector, None), slot)
    with cgutils.for_range(builder, steps, intp=I64) as loop:
        totals = body(loop.index, [builder.load(slot, typ=vector) for slot in slots])
        for slot, total in zip(slots, totals, strict=True):
            builder.store(total, slot)
    for row, slot in enumerate(slots):
        where = builder.inttoptr(builder.add(c, I64(4 * UNIT_COLUMNS * row)), PTR)
        builder.store(builder.load(slot, typ=vector), where, align=1)


def strip_bytes(dot: Dot) -> Any:
    """Return an intrinsic (rows, a, b, c, chunks): c [rows, UNIT_COLUMNS] of a tile and a strip."""
    step_bytes = GROUP * dot.width

    def build(builder: Any, args: Any) -> None:
        rows, a, b, c, chunks = args

        def emit(count: int) -> None:
            def body(index: Any, totals: list[Any]) -> list[Any]:
                at = builder.add(b, builder.mul(I64(CHUNK * dot.width), index))
                x = builder.add(a, builder.mul(I64(CHUNK * count), index))
                emit_prefetches(builder, at, CHUNK * dot.width)
                weights = [
                    dot.weights(
                        builder, load_value(builder, builder.add(at, I64(step_bytes * s)), dot.products)
                    )
                    for s in range(CHUNK // GROUP)
                ]
                correction, found = dot.correction(builder, weights), []
                for row, total in enumerate(totals):
                    words = dot.row(builder, builder.add(x, I64(CHUNK * row)), len(weights))
                    total = total if correction is None else builder.add(total, correction)
                    for weight, word in zip(weights, words, strict=True):
                        total = dot.add(builder, total, weight, word)
                    found.append(total)
                return found

            emit_chains(builder, count, dot.sums, chunks, c, body)

        emit_row_counts(builder, rows, emit)

    return op(void, [i64] * 5, build, f"strip_bytes_{dot.name}")
