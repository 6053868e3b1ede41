"""Embedding, norms, activation, rope: one row (or one head of it) at a time, in one fixed order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from draftproof.ops.cpu.attention.kv import KV_FORMS, make_store
from draftproof.ops.cpu.jit import simd as v
from draftproof.ops.cpu.jit.compile import (
    Kernel,
    copy_bytes,
    device,
    f64_of_bits,
    inlined,
    kernel,
    load_i64,
    share,
)
from draftproof.ops.reference import activations

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_GELU_SLOPE, _GELU_CUBIC = np.float32(2 * activations.GELU_SLOPE), np.float32(activations.GELU_CUBIC)
_SWIGLU_SLOPE, _SWIGLU_LIMIT = np.float32(activations.SWIGLU_SLOPE), np.float32(activations.SWIGLU_LIMIT)


@kernel
def embed(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Look up rows; args: out, tokens, table, row bytes, vocabulary."""
    out, tokens, table = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    row_bytes, vocab = load_i64(args + 24), load_i64(args + 32)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        # an id out of range reads a valid row instead of foreign memory
        token = min(max(load_i64(tokens + 8 * row), 0), vocab - 1)
        copy_bytes(out + row * row_bytes, table + token * row_bytes, row_bytes)


@kernel
def concat_columns(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
    """Concatenate rows; args: out, left, right, bytes of a row of each."""
    out, left, right = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    first, second = load_i64(args + 24), load_i64(args + 32)
    begin, end = share(rows, thread, threads)
    for row in range(begin, end):
        to = out + row * (first + second)
        copy_bytes(to, left + row * first, first)
        copy_bytes(to + first, right + row * second, second)


@device
def normalise(src: int, out: int, weight: int, width: int, eps: float, src_bf16: bool, bf16: bool) -> None:
    """Write src / rms(src), rounded, times weight to out [width]."""
    total = v.splat(_ZERO)
    for i in range(0, width, 16):
        x = v.tload(src, i, width - i, src_bf16)
        total = v.fma(x, x, total)
    inverse = v.splat(np.float32(1.0 / math.sqrt(np.float64(v.sum_lanes(total)) / width + eps)))
    for i in range(0, width, 16):
        x = v.tround(v.mul(v.tload(src, i, width - i, src_bf16), inverse), bf16)
        v.tstore(out, i, v.mul(x, v.tload(weight, i, width - i, bf16)), width - i, bf16)


def _rms_norm(x_bf16: bool, bf16: bool) -> Kernel:
    x_size, size = 2 if x_bf16 else 4, 2 if bf16 else 4

    @kernel
    def rms_norm(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Norm the vectors of rows; args: out, x, weight, width of a vector, vectors a row, eps."""
        out, x, weight = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        width, count = load_i64(args + 24), load_i64(args + 32)
        eps = f64_of_bits(load_i64(args + 40))
        begin, end = share(rows * count, thread, threads)
        for row in range(begin, end):
            at = row * width
            normalise(x + at * x_size, out + at * size, weight, width, eps, x_bf16, bf16)

    return rms_norm


def _add_rms_norm(sum_bf16: bool, bf16: bool) -> Kernel:
    sum_size, size = 2 if sum_bf16 else 4, 2 if bf16 else 4

    @kernel
    def add_rms_norm(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Add and norm rows; args: out, sum, x, residual, weight, width, eps."""
        out, total = load_i64(args), load_i64(args + 8)
        x, residual, weight = load_i64(args + 16), load_i64(args + 24), load_i64(args + 32)
        width, eps = load_i64(args + 40), f64_of_bits(load_i64(args + 48))
        begin, end = share(rows, thread, threads)
        for row in range(begin, end):
            at, sum_at = row * width * size, row * width * sum_size
            for i in range(0, width, 16):
                n = width - i
                y = v.add(v.tload(x + at, i, n, bf16), v.tload(residual + sum_at, i, n, sum_bf16))
                v.tstore(total + sum_at, i, y, n, sum_bf16)
            normalise(total + sum_at, out + at, weight, width, eps, sum_bf16, bf16)

    return add_rms_norm


@inlined
def _silu(gate: Any, up: Any) -> Any:
    return v.mul(v.mul_sigmoid(gate, gate), up)


@inlined
def _gelu_tanh(gate: Any, up: Any) -> Any:
    """Return the tanh form of GELU times `up`; (1 + tanh(z)) / 2 is the sigmoid of 2 z."""
    cubic = v.mul(v.mul(v.mul(gate, gate), gate), v.splat(_GELU_CUBIC))
    return v.mul(v.mul_sigmoid(gate, v.mul(v.add(gate, cubic), v.splat(_GELU_SLOPE))), up)


@inlined
def _swiglu_oai(gate: Any, up: Any) -> Any:
    limit = v.splat(_SWIGLU_LIMIT)
    gate, up = v.minimum(gate, limit), v.maximum(v.minimum(up, limit), v.sub(v.splat(_ZERO), limit))
    return v.mul(v.mul_sigmoid(gate, v.mul(gate, v.splat(_SWIGLU_SLOPE))), v.add(up, v.splat(_ONE)))


def _act_mul(bf16: bool, act: Any) -> Kernel:
    size = 2 if bf16 else 4

    @kernel
    def act_mul(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Apply the gated activation; args: out, gate_up, width."""
        out, gate_up, width = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        pieces = (width + 15) // 16
        begin, end = share(rows * pieces, thread, threads)
        unit = begin
        while unit < end:
            row = unit // pieces
            first, last = unit - row * pieces, min(pieces, end - row * pieces)
            gates, ups = gate_up + 2 * row * width * size, gate_up + (2 * row + 1) * width * size
            for i in range(first * 16, last * 16, 16):
                gate, up = v.tload(gates, i, width - i, bf16), v.tload(ups, i, width - i, bf16)
                v.tstore(out + row * width * size, i, act(gate, up), width - i, bf16)
            unit += last - first

    return act_mul


def _add(bf16: bool) -> Kernel:
    size = 2 if bf16 else 4

    @kernel
    def add(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Add rows; args: out, x, residual, width."""
        out, x, residual, width = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
        begin, end = share(rows, thread, threads)
        for row in range(begin, end):
            at = row * width * size
            for i in range(0, width, 16):
                n = width - i
                y = v.add(v.tload(x + at, i, n, bf16), v.tload(residual + at, i, n, bf16))
                v.tstore(out + at, i, y, n, bf16)

    return add


def _scale(bf16: bool) -> Kernel:
    size = 2 if bf16 else 4

    @kernel
    def scale(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Multiply rows; args: out, x, width, factor."""
        out, x, width = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        factor = v.splat(np.float32(f64_of_bits(load_i64(args + 24))))
        begin, end = share(rows, thread, threads)
        for row in range(begin, end):
            at = row * width * size
            for i in range(0, width, 16):
                y = v.mul(v.tload(x + at, i, width - i, bf16), factor)
                v.tstore(out + at, i, y, width - i, bf16)

    return scale


def _row_norms(bf16: bool) -> Kernel:
    size = 2 if bf16 else 4

    @kernel
    def row_norms(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Norm q and k of rows; args: out, qkv, q weight, k weight, width of q, width of k, eps."""
        out, qkv = load_i64(args), load_i64(args + 8)
        q_norm, k_norm = load_i64(args + 16), load_i64(args + 24)
        q_width, k_width = load_i64(args + 32), load_i64(args + 40)
        eps = f64_of_bits(load_i64(args + 48))
        begin, end = share(rows, thread, threads)
        for row in range(begin, end):
            at = row * (q_width + 2 * k_width) * size
            k_at, v_at = at + q_width * size, at + (q_width + k_width) * size
            normalise(qkv + at, out + at, q_norm, q_width, eps, bf16, bf16)
            normalise(qkv + k_at, out + k_at, k_norm, k_width, eps, bf16, bf16)
            copy_bytes(out + v_at, qkv + v_at, k_width * size)

    return row_norms


@device
def rotate(src: int, out: int, angles: int, half: int, bf16: bool) -> None:
    """Rotate the two halves of one head by cos [half], sin [half]."""
    for i in range(0, half, 16):
        n = half - i
        cos, sin = v.tload(angles, i, n, False), v.tload(angles, half + i, n, False)
        low, high = v.tload(src, i, n, bf16), v.tload(src, half + i, n, bf16)
        turned = v.sub(v.mul(low, cos), v.mul(high, sin))
        v.tstore(out, half + i, v.add(v.mul(high, cos), v.mul(low, sin)), n, bf16)
        v.tstore(out, i, turned, n, bf16)


def _rope_store(bf16: bool, form: int) -> Kernel:
    size, store = 2 if bf16 else 4, make_store(bf16, form)

    @kernel
    def rope_store(args: int, rows: int, thread: int, threads: int, scratch: int) -> None:
        """Rotate q and k and store k and v.

        args: q_out, qkv, positions, kv_index, rope, cache, q_norm, k_norm, num_q, num_kv, dim, max_len,
        page_size, places (pages * page_size), eps.
        """
        q_out, qkv = load_i64(args), load_i64(args + 8)
        positions, kv_index = load_i64(args + 16), load_i64(args + 24)
        rope, cache = load_i64(args + 32), load_i64(args + 40)
        q_norm, k_norm = load_i64(args + 48), load_i64(args + 56)
        num_q, num_kv, dim = load_i64(args + 64), load_i64(args + 72), load_i64(args + 80)
        max_len, page_size, places = load_i64(args + 88), load_i64(args + 96), load_i64(args + 104)
        eps = f64_of_bits(load_i64(args + 112))
        heads = num_q + 2 * num_kv
        begin, end = share(rows * heads, thread, threads)
        for unit in range(begin, end):
            row = unit // heads
            head = unit - row * heads
            src, place, kv_head = qkv + unit * dim * size, 0, 0
            position = min(max(load_i64(positions + 8 * row), 0), max_len - 1)
            angles = rope + position * dim * 4
            if head < num_q:
                dst = q_out + (row * num_q + head) * dim * size
                norm = q_norm
            else:
                place = load_i64(kv_index + 8 * row)
                if place < 0 or place >= places:
                    continue  # padding: nothing to store
                is_v = head >= num_q + num_kv
                kv_head = head - num_q - (num_kv if is_v else 0)
                if is_v:
                    store(cache, places + place, kv_head, src, page_size, num_kv, dim)
                    continue
                dst = scratch
                norm = k_norm
            if norm != 0:
                normalise(src, dst, norm, dim, eps, bf16, bf16)
                src = dst
            rotate(src, dst, angles, dim // 2, bf16)
            if head >= num_q:
                store(cache, place, kv_head, dst, page_size, num_kv, dim)

    return rope_store


# kernels by activation dtype: [fp32, bf16]
ADD: list[Any] = [_add(False), _add(True)]
SCALE: list[Any] = [_scale(False), _scale(True)]
ROW_NORMS: list[Any] = [_row_norms(False), _row_norms(True)]
# (residual is bf16, activations are bf16) -> kernel
_NORMED: list[tuple[bool, bool]] = [(False, False), (False, True), (True, True)]
RMS_NORM: dict[tuple[bool, bool], Any] = {key: _rms_norm(*key) for key in _NORMED}
ADD_RMS_NORM: dict[tuple[bool, bool], Any] = {key: _add_rms_norm(*key) for key in _NORMED}
# activation -> kernels by activation dtype
ACT_MUL: dict[str, list[Any]] = {
    name: [_act_mul(False, act), _act_mul(True, act)]
    for name, act in (("silu", _silu), ("gelu_tanh", _gelu_tanh), ("swiglu_oai", _swiglu_oai))
}
# KV form -> kernels by activation dtype
ROPE_STORE: dict[int, list[Any]] = {
    form: [_rope_store(False, form), _rope_store(True, form)] for form in set(KV_FORMS.values())
}
