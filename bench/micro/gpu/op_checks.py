"""Check the triton backend on a GPU: results against the reference, and batch invariance.

Batch invariance: the bits of a row are independent of the other rows. Each check raises
AssertionError; `op_times.py` runs the checks and reports.
"""

# ruff: noqa: B023 - every lambda here is called before its loop goes on
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftproof.ops import Attention, AttentionShape, Rows
from draftproof.ops.reference.backend import ReferenceOps
from draftproof.ops.torch.backend import TorchOps
from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.gemm import tiles

GPU = torch.device("cuda")
CPU = torch.device("cpu")
COUNTS = (1, 2, 3, 6, 8, 16, 17, 64, 65, 128, 256, 512, 1000)
SMALL = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
LARGE = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
SMALL_HEADS = AttentionShape(num_q=9, num_kv=3, dim=64, scale=0.125, window=0)
LARGE_HEADS = AttentionShape(num_q=32, num_kv=8, dim=128, scale=128**-0.5, window=0)
INF = float("inf")
PAGE = 16
DTYPES = (torch.bfloat16, torch.float32)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator(device=GPU).manual_seed(seed)
    return torch.randn(shape, generator=random, device=GPU).to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, where: str) -> None:
    exact = dtype == torch.float32
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if exact else {"rtol": 2**-7, "atol": 1e-2}
    torch.testing.assert_close(
        got.double().cpu(), want.double().cpu(), **tolerance, msg=lambda text: f"{where}: {text}"
    )


def check_batch_invariance(call: Callable[[int, int], Tensor], pool: int, where: str) -> None:
    """Compare calls of each row count at the first, middle and last position with one call of all rows."""
    whole = call(0, pool)
    for count in (n for n in COUNTS if n <= pool):
        for first in {0, (pool - count) // 2, pool - count}:
            out = call(first, count)
            wrong = (out != whole[first : first + count]).flatten(1).any(1) if out.ndim > 1 else None
            assert torch.equal(out, whole[first : first + count]), (
                f"{where}: {count} rows from {first}: {'' if wrong is None else int(wrong.sum())} differ"
            )


# --- correctness ------------------------------------------------------------------------------------------


def linear_is_right(ops: TritonOps) -> None:
    for dtype in DTYPES:
        for columns, depth in ((53, 72), (97, 200), (1, 16), (960, 576), (576, 1536)):
            weight = randn(columns, depth, seed=1, dtype=dtype) / depth**0.5
            for bias in (None, randn(columns, seed=2, dtype=dtype)):
                packed = ops.forward.pack_linear(weight, bias)
                for rows in (1, 6, 17, 33, 70, 130, 300, 700):
                    x = randn(rows, depth, seed=rows, dtype=dtype)
                    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
                    where = f"linear {dtype} {columns}x{depth} {rows} rows bias {bias is not None}"
                    close(ops.forward.linear(x, packed), want, dtype, where)
                    close(ops.forward.linear(x, packed, torch.float32), want, torch.float32, where)


def elementwise_is_right(ops: TritonOps) -> None:
    ref = ReferenceOps(CPU)
    for dtype in DTYPES:
        for width in (8, 45, 576, 4096):
            weight, x = randn(width, seed=1, dtype=dtype), 3 * randn(5, width, seed=2, dtype=dtype)
            residual, both = (
                randn(5, width, seed=3, dtype=dtype),
                4 * randn(5, 2 * width, seed=4, dtype=dtype),
            )
            want = ref.forward.rms_norm(x.cpu(), weight.cpu(), 1e-6)
            close(ops.forward.rms_norm(x, weight, 1e-6), want, dtype, "rms_norm")
            got = ops.forward.add_rms_norm(x, residual, weight, 1e-5)
            wants = ref.forward.add_rms_norm(x.cpu(), residual.cpu(), weight.cpu(), 1e-5)
            close(got[0], wants[0], dtype, "add_rms_norm")
            assert torch.equal(got[1].cpu(), wants[1]), "sum of add_rms_norm"
            close(ops.forward.act_mul(both), ref.forward.act_mul(both.cpu()), dtype, "act_mul")
            tokens = torch.tensor([4, 0, 4], device=GPU)
            assert torch.equal(ops.forward.embed(tokens, x), x[tokens]), "embed"


class Paged:
    """Slots of given lengths on pages out of order; NaN wherever no row may look."""

    def __init__(self, heads: AttentionShape, lengths: list[int], dtype: torch.dtype) -> None:
        self.heads, self.lengths = heads, lengths
        most = max(-(-n // PAGE) for n in lengths)
        order = 1 + torch.randperm(len(lengths) * most, generator=torch.Generator().manual_seed(1))
        self.page_table = order.view(len(lengths), most).to(torch.int32).to(GPU)
        shape = (2, len(order) + 1, PAGE, heads.num_kv, heads.dim)
        self.cache = torch.full(shape, torch.nan, dtype=dtype, device=GPU)
        flat = self.cache.view(2, -1, heads.num_kv, heads.dim)
        for slot, length in enumerate(lengths):
            at = self.places(torch.full((length,), slot, device=GPU), torch.arange(length, device=GPU))
            flat[:, at] = randn(2, length, heads.num_kv, heads.dim, seed=slot, dtype=dtype)

    def places(self, slots: Tensor, positions: Tensor) -> Tensor:
        return self.page_table[slots, positions // PAGE].long() * PAGE + positions % PAGE

    def rows(self, where: list[tuple[int, int]]) -> Rows:
        slots = torch.tensor([s for s, _ in where], device=GPU)
        positions = torch.tensor([p for _, p in where], device=GPU)
        return Rows(slots * 0, positions, slots, self.places(slots, positions), self.page_table)


def rope(heads: AttentionShape, length: int) -> Tensor:
    angles = torch.arange(length, device=GPU)[:, None] / 10000.0 ** (
        torch.arange(heads.dim // 2, device=GPU)[None] * 2 / heads.dim
    )
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def on_cpu(rows: Rows) -> Rows:
    columns = (rows.tokens, rows.positions, rows.slots, rows.kv_index, rows.page_table)
    return Rows(*(x.cpu() for x in columns))


def rope_and_attention_are_right(ops: TritonOps) -> None:
    ref = ReferenceOps(CPU)
    kinds = [
        SMALL_HEADS,
        AttentionShape(num_q=4, num_kv=2, dim=8, scale=0.35, window=9),
        AttentionShape(num_q=2, num_kv=1, dim=80, scale=0.1, window=70),
        AttentionShape(num_q=8, num_kv=1, dim=128, scale=0.1, window=0),
    ]
    for dtype in DTYPES:
        for heads in kinds:
            paged = Paged(heads, [1, 5, 33, 132, 700], dtype)
            where = [(1, 4), *((3, p) for p in range(125, 132)), (0, 0), (4, 698), (4, 699)]
            rows, label = paged.rows(where), f"{dtype} {heads}"
            q = randn(len(where), heads.num_q * heads.dim, seed=7, dtype=dtype)
            for chosen in (range(len(where)), range(9, 11), range(1)):
                part = paged.rows([where[i] for i in chosen])
                want = ref.forward.attention(q[list(chosen)].cpu(), on_cpu(part), heads, paged.cache.cpu())
                close(
                    ops.forward.attention(q[list(chosen)], part, heads, paged.cache),
                    want,
                    dtype,
                    f"attention {label}",
                )
            qkv = randn(len(where), (heads.num_q + 2 * heads.num_kv) * heads.dim, seed=8, dtype=dtype)
            for norms in ([None, None], [randn(heads.dim, seed=i, dtype=dtype) for i in (1, 2)]):
                caches = [torch.zeros_like(paged.cache), torch.zeros_like(paged.cache, device=CPU)]
                table = rope(heads, 800)
                normed = Attention(heads, None, None, *norms)
                got = ops.forward.rope_store(qkv, rows, normed, table, caches[0], 1e-6)
                normed = Attention(heads, None, None, *(None if w is None else w.cpu() for w in norms))
                want = ref.forward.rope_store(qkv.cpu(), on_cpu(rows), normed, table.cpu(), caches[1], 1e-6)
                close(got, want, dtype, f"rope {label}")
                close(caches[0], caches[1], dtype, f"stored {label}")


def logits_of(count: int, vocab: int, seed: int = 0) -> Tensor:
    x = 3 * randn(count, vocab, seed=seed)
    x[1::5] = x[1::5].round()
    x[2::5] = 0.0
    x[3::5] = torch.where(randn(len(x[3::5]), vocab, seed=seed + 1) < 0.5, -INF, x[3::5])
    x[3::5, vocab // 2] = 1.0
    x[4::5] = -x[4::5].abs() - 50
    return x


def keys(count: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(count)
    seeds = torch.randint(0, 2**63 - 1, (count,), generator=random)
    seeds[:2] = torch.tensor([0, 2**63 - 1])[:count]
    return seeds.to(GPU), torch.randint(0, 1 << 20, (count,), generator=random).to(GPU)


def noise_is_the_cpus(ops: TritonOps) -> None:
    ref = TorchOps(CPU)
    seeds, positions = keys(2000)
    for stream in range(4):
        want = ref.sampling.uniform(seeds.cpu(), positions.cpu(), stream)
        assert torch.equal(ops.sampling.uniform(seeds, positions, stream).cpu(), want), (
            f"uniform, stream {stream}"
        )
    for vocab, count in ((1, 3), (61, 500), (49152, 40), (128256, 10)):
        scaled = logits_of(count, vocab)
        seeds, positions = keys(count)
        want = ref.sampling.gumbel_argmax(scaled.cpu(), seeds.cpu(), positions.cpu(), 0)
        got = ops.sampling.gumbel_argmax(scaled, seeds, positions, 0).cpu()
        assert torch.equal(got, want), f"gumbel_argmax, {vocab}: {int((got != want).sum())} of {count} differ"


def order_is_right(ops: TritonOps) -> None:
    ref = TorchOps(CPU)
    for vocab in (3, 61, 4099, 49152, 128256):
        x = logits_of(10, vocab)
        host = x.cpu()
        assert torch.equal(ops.sampling.argmax(x).cpu(), ref.sampling.argmax(host)), f"argmax {vocab}"
        close(
            ops.sampling.logsumexp(x), torch.logsumexp(host.double(), 1), torch.float32, f"logsumexp {vocab}"
        )
        ids = (torch.arange(10) * 7) % vocab
        assert torch.equal(ops.sampling.rank(x, ids.to(GPU)).cpu(), ref.sampling.rank(host, ids)), (
            f"rank {vocab}"
        )
        for k in {1, min(5, vocab), min(20, vocab), min(64, vocab), min(300, vocab)}:
            got, want = ops.sampling.top(x, k), ref.sampling.top(host, k)
            assert torch.equal(got[1].cpu(), want[1]), f"top {k} of {vocab}: ids"
            assert torch.equal(got[0].cpu(), want[0]), f"top {k} of {vocab}: values"


def truncation_is_right(ops: TritonOps) -> None:
    ref = TorchOps(CPU)
    choices = [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.7, 0.0),
        (0, 1.0, 0.1),
        (9, 0.8, 0.02),
        (50, 0.9, 0.0),
        (0, 0.95, 0),
    ]
    for vocab in (3, 61, 4099, 49152):
        scaled = logits_of(35, vocab)
        k, p, m = (torch.tensor([float(c[i]) for c in choices] * 5) for i in range(3))
        got = ops.sampling.truncate(scaled, k.long().to(GPU), p.to(GPU), m.to(GPU)).cpu()
        want = ref.sampling.truncate(scaled.cpu(), k.long(), p, m)
        wrong = (got != want).any(1).nonzero()[:, 0].tolist()
        kept = [(choices[r % 7], int((got[r] > -INF).sum()), int((want[r] > -INF).sum())) for r in wrong]
        assert not wrong, f"truncate {vocab}: rows {wrong}: (limits, kept, wanted) {kept}"


# --- batch invariance -------------------------------------------------------------------------------------


def linear_is_batch_invariant(ops: TritonOps) -> None:
    jobs = [(torch.bfloat16, shape) for shape in SMALL + LARGE]
    jobs += [(torch.float32, shape) for shape in SMALL[:4]]
    for dtype, (columns, depth) in jobs:
        packed = ops.forward.pack_linear(randn(columns, depth, seed=1, dtype=dtype))
        x = randn(1000, depth, seed=2, dtype=dtype)
        for out in (torch.float32, dtype):
            label = f"linear {columns}x{depth} {dtype} out {out}"
            check_batch_invariance(
                lambda a, n, o=out, p=packed, x=x: ops.forward.linear(x[a : a + n], p, o), 1000, label
            )


def tiles_do_not_change_bits(ops: TritonOps) -> None:
    """Check that every tile gives the same fp32 bits."""
    packed = ops.forward.pack_linear(randn(1024, 1536, seed=1, dtype=torch.bfloat16))
    x = randn(200, 1536, seed=2, dtype=torch.bfloat16)
    known = {*ops.forward.tiles.measured.values(), *(t for row in tiles.BF16_TILES.values() for t in row)}
    want = None
    for tile in sorted(known):
        out = torch.empty((200, 1024), device=GPU)
        ops.forward.gemm(x, packed, out, ops.launch.pdl, tile)
        want = out if want is None else want
        assert torch.equal(out, want), f"{tile} gives other bits"


def other_ops_are_batch_invariant(ops: TritonOps) -> None:
    for width in (576, 4096):
        x, residual = (randn(1000, width, seed=i, dtype=torch.bfloat16) for i in (1, 2))
        weight = randn(width, seed=3, dtype=torch.bfloat16)
        check_batch_invariance(
            lambda a, n: ops.forward.rms_norm(x[a : a + n], weight, 1e-6), 1000, "rms_norm"
        )
        check_batch_invariance(
            lambda a, n: torch.cat(
                ops.forward.add_rms_norm(x[a : a + n], residual[a : a + n], weight, 1e-6), 1
            ),
            1000,
            "add_rms_norm",
        )
        check_batch_invariance(lambda a, n: ops.forward.act_mul(x[a : a + n]), 1000, "act_mul")
    logits, (seeds, positions) = logits_of(256, 49152), keys(256)
    limits = (
        torch.full((256,), 40, device=GPU),
        torch.full((256,), 0.9, device=GPU),
        torch.zeros(256, device=GPU),
    )
    check_batch_invariance(lambda a, n: ops.sampling.logsumexp(logits[a : a + n]), 256, "logsumexp")
    check_batch_invariance(lambda a, n: ops.sampling.argmax(logits[a : a + n]), 256, "argmax")
    check_batch_invariance(lambda a, n: ops.sampling.top(logits[a : a + n], 20)[1], 256, "top")
    part = lambda a, n: (logits[a : a + n], seeds[a : a + n], positions[a : a + n])  # noqa: E731
    check_batch_invariance(lambda a, n: ops.sampling.gumbel_argmax(*part(a, n), 0), 256, "gumbel_argmax")
    check_batch_invariance(
        lambda a, n: ops.sampling.truncate(logits[a : a + n], *(x[a : a + n] for x in limits)),
        256,
        "truncate",
    )


def attention_is_batch_invariant(ops: TritonOps) -> None:
    """Compare fp32 outputs of single rows with those of 2 to 9 verify rows, of chunks and of batches."""
    for heads in (SMALL_HEADS, LARGE_HEADS, AttentionShape(32, 8, 128, 128**-0.5, 1000)):
        for dtype in (torch.bfloat16, torch.float32) if heads is SMALL_HEADS else (torch.bfloat16,):
            paged = Paged(heads, [4000, 400, 1500] + [70] * 30, dtype)
            q = {
                slot: randn(n, heads.num_q * heads.dim, seed=slot, dtype=dtype)
                for slot, n in enumerate(paged.lengths)
            }

            def run(where: list[tuple[int, int]], q=q, paged=paged, heads=heads) -> Tensor:
                x = torch.stack([q[s][p] for s, p in where])
                out = torch.full(x.shape, torch.nan, device=GPU)
                ops.forward.attention_into(x, paged.rows(where), heads, paged.cache, out)
                return out

            watched = [(0, p) for p in (0, 63, 64, 511, 512, 1023, 3990, 3999)] + [
                (1, 399),
                (2, 1400),
                (7, 69),
            ]
            alone = {at: run([at])[0] for at in watched}
            batches = [
                [(0, p) for p in range(3400, 4000)],
                [(0, p) for p in range(1100)],
                [(1, p) for p in range(400)],
                sorted(watched),
                [(s, 69) for s in range(3, 33)] + [(0, 3999)],
                [(7, 69), *((0, p) for p in range(3985, 3993)), (2, 1400)],
                # decode rows, verify rows and prompts in one call: low and high tiles
                [(s, 69) for s in range(3, 33)]
                + [(1, p) for p in range(396, 400)]
                + [(0, p) for p in range(3500, 4000)]
                + [(2, p) for p in range(1390, 1401)],
            ]
            for s, p in watched:
                for count in (2, 5, 6, 9):
                    for first in (p, p - count + 1):
                        line = range(max(0, first), min(first + count, paged.lengths[s]))
                        batches.append([(s, i) for i in line])
            for batch in batches:
                out = run(batch)
                assert not out.isnan().any(), f"attention {heads}: NaN among {len(batch)}"
                for at, row in zip(batch, out, strict=True):
                    if at in alone:
                        assert torch.equal(row, alone[at]), (
                            f"attention {heads} {dtype}: {at} among {len(batch)}"
                        )


def two_ops_in_one(ops: TritonOps) -> None:
    """Check that kernels for two ops give the bits of the two ops, for every number of rows."""
    for heads, hidden, inner in ((SMALL_HEADS, 576, 1536), (LARGE_HEADS, 4096, 14336)):
        width = (heads.num_q + 2 * heads.num_kv) * heads.dim
        qkv = ops.forward.pack_linear(randn(width, hidden, seed=1, dtype=torch.bfloat16) / hidden**0.5)
        gate_up = ops.forward.pack_linear(
            randn(2 * inner, hidden, seed=2, dtype=torch.bfloat16) / hidden**0.5
        )
        paged, table = Paged(heads, [520], torch.bfloat16), rope(heads, 600)
        x = randn(512, hidden, seed=3, dtype=torch.bfloat16)
        for count in (n for n in COUNTS if n <= 512):
            rows = paged.rows([(0, p) for p in range(count)])
            caches = [torch.zeros_like(paged.cache), torch.zeros_like(paged.cache)]
            attention = Attention(heads, qkv, None)
            got = ops.forward.linear_rope_store(x[:count], rows, attention, table, caches[0], 1e-6)
            product = ops.forward.linear(x[:count], qkv)
            want = ops.forward.rope_store(product, rows, attention, table, caches[1], 1e-6)
            assert torch.equal(got, want) and torch.equal(*caches), f"linear_rope_store, {count} rows"
            got, want = (
                ops.forward.linear_act_mul(x[:count], gate_up),
                ops.forward.act_mul(ops.forward.linear(x[:count], gate_up)),
            )
            assert torch.equal(got, want), f"linear_act_mul, {count} rows"


def cublas_everywhere_is_noticed(ops: TritonOps) -> None:
    """Check that the comparison finds differing rows with cuBLAS at every number of rows."""
    packed = ops.forward.pack_linear(randn(4096, 14336, seed=1, dtype=torch.bfloat16) / 120)
    x = randn(512, 14336, seed=2, dtype=torch.bfloat16)
    counts = (1, 8, 64, 128, 256)
    for mode, differs in (("proven", False), ("always", True)):
        other = TritonOps(GPU, cublas=mode)
        whole = other.forward.linear(x, packed)
        wrong = [n for n in counts if not torch.equal(other.forward.linear(x[:n], packed), whole[:n])]
        assert bool(wrong) == differs, f"cublas={mode!r}: rows differ at {wrong}"


CHECKS: list[Callable[[TritonOps], None]] = [
    linear_is_right,
    elementwise_is_right,
    rope_and_attention_are_right,
    noise_is_the_cpus,
    order_is_right,
    truncation_is_right,
    tiles_do_not_change_bits,
    linear_is_batch_invariant,
    other_ops_are_batch_invariant,
    attention_is_batch_invariant,
    two_ops_in_one,
    cublas_everywhere_is_noticed,
]
