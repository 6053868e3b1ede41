"""Recorded passes of the cpu backend: equal to eager passes; memory and threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftproof.ops import Attention, AttentionShape, QuantizedTable, Rows

pytest.importorskip("numba")

from cpu_cases import CPU, KINDS, PAGE, make, poison, rand, same
from draftproof.ops.cpu.backend import CpuOps
from draftproof.ops.cpu.draft_rounds import CpuRounds
from draftproof.ops.cpu.gemm.formats import QUANTIZED_FORMATS
from opcheck import Paged


class Tiny:
    """Two-layer model of the forward ops."""

    def __init__(self, ops: CpuOps, dtype: torch.dtype) -> None:
        self.ops, self.heads = ops, AttentionShape(4, 2, 16, 0.25, 0)
        self.table = rand(97, 48, dtype=dtype)
        shapes = {"qkv": (128, 48), "o": (48, 64), "gu": (160, 48), "down": (48, 80)}
        self.layers: list[dict[str, Any]] = [{}, {}]
        for i, layer in enumerate(self.layers):
            layer.update(n1=rand(48, dtype=dtype, seed=i), n2=rand(48, dtype=dtype, seed=10 + i))
            for n, (name, shape) in enumerate(shapes.items()):
                layer[name] = ops.forward.pack_linear(rand(*shape, dtype=dtype, seed=20 + 10 * n + i) / 8)
        self.head = ops.forward.pack_linear(self.table)
        angles = torch.outer(torch.arange(512.0), 0.5 ** torch.arange(8))
        self.rope = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.caches = [torch.full((2, 40, PAGE, 2, 16), float("nan")).to(dtype) for _ in range(2)]

    def forward(self, rows: Rows) -> Tensor:
        ops, heads, attention = self.ops, self.heads, Attention(self.heads, None, None)
        x = ops.forward.embed(rows.tokens, self.table)
        h = ops.forward.rms_norm(x, self.layers[0]["n1"], 1e-5)
        for i, layer in enumerate(self.layers):
            if i:
                h, x = ops.forward.add_rms_norm(h, x, layer["n1"], 1e-5)
            qkv = ops.forward.linear(h, layer["qkv"])
            q = ops.forward.rope_store(qkv, rows, attention, self.rope, self.caches[i], 1e-5)
            h = ops.forward.linear(ops.forward.attention(q, rows, heads, self.caches[i]), layer["o"])
            h, x = ops.forward.add_rms_norm(h, x, layer["n2"], 1e-5)
            h = ops.forward.linear(ops.forward.act_mul(ops.forward.linear(h, layer["gu"])), layer["down"])
        normed, _ = ops.forward.add_rms_norm(h, x, self.layers[0]["n1"], 1e-5)
        return ops.forward.linear(normed, self.head, torch.float32)


def tokens_of(places: list[tuple[int, int]], paged: Paged) -> Rows:
    rows = paged.rows(places)
    tokens = (rows.positions * 31 + rows.slots * 7) % 97
    return Rows(tokens, rows.positions, rows.slots, rows.kv_index, rows.page_table)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_pass_equals_eager_pass_at_any_thread_count(kind: str) -> None:
    results = []
    for threads in (1, 2, 3):
        ops, dtype = make(kind, threads)
        model = Tiny(ops, dtype)
        paged = Paged(model.heads, [290, 30], dtype, PAGE)
        captured = ops.runtime.capture(lambda rows, model=model: (model.forward(rows),), 300)
        chunk = [(0, p) for p in range(280)] + [(1, p) for p in range(20)]
        step = [(0, p) for p in range(280, 288)] + [(1, 20)]
        eager = [model.forward(tokens_of(places, paged)).clone() for places in (chunk, step)]
        for cache in model.caches:
            cache.fill_(float("nan"))
        again = [captured(tokens_of(places, paged))[0].clone() for places in (chunk, step)]
        assert same(eager[0], again[0]) and same(eager[1], again[1])
        poison(ops)
        captured._recorded._program.arena.fill(0xFF)  # type: ignore[attr-defined]
        for i in range(8):  # one at a time, after the keys of the rows before
            (alone,) = captured(tokens_of(step[i : i + 1], paged))
            assert same(alone, eager[1][i : i + 1])
        assert not eager[0].isnan().any()
        assert captured(tokens_of(step[:1], paged))[0].shape == (1, 97)
        results.append(torch.cat(eager))
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_capture_records_again_for_a_new_page_table_and_rejects_torch_ops() -> None:
    ops, dtype = make("fp32")
    model = Tiny(ops, dtype)
    captured = ops.runtime.capture(lambda rows: (model.forward(rows),), 4)
    first, second = (Paged(model.heads, [30], dtype, PAGE) for _ in range(2))
    a = captured(tokens_of([(0, 0), (0, 1)], first))[0].clone()
    b = captured(tokens_of([(0, 0), (0, 1)], second))[0].clone()
    assert same(a, b)
    with pytest.raises(ValueError, match="captured for 4"):
        captured(tokens_of([(0, p) for p in range(5)], first))

    def foreign(rows: Rows) -> tuple[Tensor, ...]:
        doubled = ops.forward.embed(rows.tokens, model.table) * 2
        return (ops.forward.rms_norm(doubled, model.layers[0]["n1"], 1e-5),)

    with pytest.raises(Exception, match="ops only"):
        ops.runtime.capture(foreign, 4)(tokens_of([(0, 0)], first))
    assert same(model.forward(tokens_of([(0, 0), (0, 1)], first)), a)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_pass_reads_changed_input_rows(kind: str) -> None:
    """Feed the pass its own result, as draft rounds do."""
    ops, dtype = make(kind)
    model = Tiny(ops, dtype)
    paged = Paged(model.heads, [30], dtype, PAGE)
    norm = torch.cat([model.layers[0]["n1"]] * 2)

    def forward(rows: Rows, left: Tensor) -> tuple[Tensor, ...]:
        wide = ops.forward.concat_columns(left, ops.forward.embed(rows.tokens, model.table))
        return (ops.forward.rms_norm(wide, norm, 1e-5),)

    captured, width = ops.runtime.capture(forward, 40), model.table.shape[1]
    left = torch.randn(29, width).to(dtype)
    for count in (29, 1, 7):
        rows = tokens_of([(0, p) for p in range(count)], paged)
        wide = torch.cat([left[:count], model.table[rows.tokens]], 1)
        expected = ops.forward.rms_norm(wide, norm, 1e-5)
        (found,) = captured(rows, left[:count])
        assert same(found, expected)
        (again,) = captured(rows, found[:, :width])
        assert same(again, forward(rows, expected[:, :width])[0])


def test_arena_buffers_do_not_overlap_while_in_use() -> None:
    from draftproof.ops.cpu.jit.program import place

    numbers = np.random.default_rng(0)
    for _ in range(50):
        births = np.sort(numbers.integers(0, 30, 40))
        buffers = [(int(numbers.integers(1, 500)), int(b), int(b + numbers.integers(0, 8))) for b in births]
        offsets, total = place(buffers)
        for i, (size, born, last) in enumerate(buffers):
            assert offsets[i] % 64 == 0 and offsets[i] + size <= total
            for j in range(i):
                other, other_born, other_last = buffers[j]
                if other_born <= last and born <= other_last:
                    assert offsets[i] + size <= offsets[j] or offsets[j] + other <= offsets[i]


def test_two_thread_pools_run_in_parallel_threads() -> None:
    """Run several pools at once: ctypes releases the GIL, and pools do not block each other."""
    weight, x = rand(200, 64), rand(9, 64, seed=1)
    results: list[Tensor] = []

    def work() -> None:
        mine = CpuOps(CPU, threads=2)
        packed = mine.forward.pack_linear(weight)
        for _ in range(200):
            out = mine.forward.linear(x, packed)
        results.append(out)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("is_lm_head", [False, True])
def test_kernels_of_the_logits_are_compiled_with_a_pass_whose_table_is_the_lm_head(is_lm_head: bool) -> None:
    ops, dtype = make("fp32", 1)
    data, scales = torch.ones((64, 32), dtype=torch.int8), torch.ones((64, 1, 1), dtype=torch.float16)
    packed = ops.forward.pack_quantized("blocks", data, scales)
    table = QuantizedTable(packed, (64, 32), dtype, dtype if is_lm_head else None)
    run = ops.forward._run
    before = set(run.later)
    captured = ops.runtime.capture(lambda rows: (ops.forward.embed(rows.tokens, table),), 4)
    zeros = torch.zeros(4, dtype=torch.int64)
    (found,) = captured(Rows(zeros, zeros, zeros, zeros, torch.zeros((1, 1), dtype=torch.int32)))
    assert found.unique().tolist() == [1.0]
    form = QUANTIZED_FORMATS["blocks"]
    needed = {form.kernel(packed, False), form.quantize_rows(packed, dtype)}
    assert run.later - before == (needed if is_lm_head else set())


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_scores_of_a_draft_round_equal_eager_ones(kind: str) -> None:
    """Compare logits, best columns and logsumexp of few rows, again with other rows and other weights."""
    ops, dtype = make(kind)
    rounds, x, eps = ops.rounds, rand(20, 48, dtype=dtype, seed=1), 1e-5
    assert isinstance(rounds, CpuRounds)
    for seed, needs_total in ((2, True), (3, False)):
        norm = rand(48, dtype=dtype, seed=seed)
        packed = ops.forward.pack_linear(rand(97, 48, dtype=dtype, seed=10 + seed))
        want = rounds._scores_of(norm, eps, packed, needs_total)(x)
        for first, count in ((0, 1), (3, 16), (19, 1), (5, 4)):
            found = rounds._recorded.get(norm, eps, packed, needs_total)(x[first : first + count])
            assert all(same(a, b[first : first + count]) for a, b in zip(found, want, strict=True))
