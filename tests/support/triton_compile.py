"""Compile every kernel of the triton backend for a GPU, on a machine without one.

    PYTHONPATH=src python tests/support/triton_compile.py [compute capability, default 90]

Ops are called on CPU tensors; a compilation with the same arguments replaces each launch. Shared memory and
the main instructions are printed. Type errors, unknown operations, tiles that do not fit and attention whose
sums have another order in short tiles than in tall ones are found.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

from draftproof.models.layers import run_layers
from draftproof.ops import (
    Attention,
    AttentionShape,
    DraftVocab,
    KVLayout,
    LatentAttention,
    Layer,
    Mlp,
    Moe,
    NamedIds,
    Routing,
    Rows,
    TokenLogprobs,
)
from draftproof.ops.contract.draft_search import AcceptanceRecord, DraftCandidate, SuffixOptions
from draftproof.ops.contract.kv_layout import KV_FORMATS
from draftproof.ops.contract.types import ACTIVATIONS
from draftproof.ops.triton import kernel_utils
from draftproof.ops.triton.attention.few_rows import LONG_ROW_TABLE_TOKENS
from draftproof.ops.triton.attention.warp_specialized import LONG_TABLE_TOKENS, MIN_TALL_ROWS
from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.gemm.weight import FOUR_BITS, PackedLinear
from draftproof.ops.triton.graphs import TritonRuntime
from draftproof.ops.triton.latent.attention import MIN_FP32_SHARED_BYTES
from draftproof.types import TOKENS, Choice, DeviceBatch, Draft, DraftRanking, Outcome, Windows
from no_gpu import Chip

CPU = torch.device("cpu")
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.float16: "*fp16",
}
CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 120: 99 << 10}.get(CAPABILITY, 227 << 10)
seen: set[str] = set()
too_large: list[str] = []  # kernels that do not fit into the shared memory
permuted: list[str] = []  # attention with operands of tiles permuted, see `convert_elements` of kv_cache.py


def launch_source(self, args, kwargs):  # type: ignore[no-untyped-def]
    """Return what a launch compiles: its source and options; then its arguments by name."""
    names = [p.name for p in self.params]
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    options = {k: v for k, v in kwargs.items() if k not in names}
    signature, constants, attrs = {}, {}, {}
    for index, parameter in enumerate(self.params):
        value = given[parameter.name]
        fixed = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or fixed or value is None:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i64" if abs(value) >= 2**31 else "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attrs[(index,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(self, GluonJITFunction) else ASTSource
    return kind(fn=self, signature=signature, constexprs=constants, attrs=attrs), options, given


def compile_launch(self, *args, grid, warmup, **kwargs):  # type: ignore[no-untyped-def]
    """Replace JITFunction.run by a compilation."""
    source, options, given = launch_source(self, args, kwargs)
    label = f"{self.fn.__name__} {source.signature} {source.constants} {options}"
    if label in seen:
        return
    seen.add(label)
    begun = time.perf_counter()
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    ptx = made.asm["ptx"]
    kinds = [w for w in ("wgmma", "mma.sync", "cp.async", "fma.rn.f32", "griddepcontrol") if w in ptx]
    shape = {k: v for k, v in given.items() if k in ("BM", "BN", "BK", "K", "D", "CHUNK", "SIDE", "BLOCK")}
    resources = f"warps {made.metadata.num_warps} shared {made.metadata.shared}"
    print(f"{self.fn.__name__} {shape} {resources} {kinds} {time.perf_counter() - begun:.1f} s", flush=True)
    if made.metadata.shared > SHARED_BYTES:
        too_large.append(f"{self.fn.__name__} {shape} {resources}")
    is_attention = "attention" in self.fn.__name__ and not isinstance(self, GluonJITFunction)
    if is_attention and "kWidth = 4" in made.asm["ttgir"]:
        permuted.append(f"{self.fn.__name__} {shape}")


def forward(
    ops: TritonOps, dtype: torch.dtype, rows: int, heads: AttentionShape, hidden: int, capacity: int
) -> None:
    width = (heads.num_q + 2 * heads.num_kv) * heads.dim
    column = torch.zeros(rows, dtype=torch.int64)
    table = torch.zeros((4, capacity // 16), dtype=torch.int32)
    these = Rows(column, column, column, column, table)
    cache = torch.empty((2, 8, 16, heads.num_kv, heads.dim), dtype=dtype)
    x = torch.empty((rows, hidden), dtype=dtype)
    weight = torch.empty(hidden, dtype=dtype)
    norm = torch.empty(heads.dim, dtype=dtype)
    ops.forward.embed(column, x)
    ops.forward.rms_norm(x, weight, 1e-6)
    ops.forward.add_rms_norm(x, x, weight, 1e-6)
    ops.forward.act_mul(x)
    rope = torch.empty((64, heads.dim))
    qkv = torch.empty((rows, width), dtype=dtype)
    for norms in ((None, None), (norm, norm)):
        ops.forward.rope_store(qkv, these, Attention(heads, None, None, *norms), rope, cache, 1e-6)
    packed = PackedLinear(torch.empty((width, hidden), dtype=dtype), None)
    ops.forward.linear_rope_store(x, these, Attention(heads, packed, None), rope, cache, 1e-6)
    ops.forward.linear_act_mul(x, packed)
    q = qkv[:, : heads.num_q * heads.dim].contiguous()
    ops.forward.attention(q, these, heads, cache)
    for_families(ops, x, packed, Attention(heads, None, None), qkv)
    ops.forward.attention(q, these, heads, cache, torch.empty(heads.num_q))
    for form in KV_FORMATS.values():
        if form.dtype != torch.float8_e4m3fn or CAPABILITY >= 89:
            (cache,) = KVLayout(1, heads.num_kv, heads.dim, form.dtype).allocate(8, 16, CPU)
            ops.forward.rope_store(qkv, these, Attention(heads, None, None), rope, cache, 1e-6)
            ops.forward.attention(q, these, heads, cache)


def long_attention(ops: TritonOps, heads: AttentionShape) -> None:
    """Call the attention of page tables for long contexts of all KV formats: few rows to a prompt."""
    tokens = {1: LONG_ROW_TABLE_TOKENS}  # of the page table, where another kernel is compiled for it
    formats = [form.dtype for form in KV_FORMATS.values() if CAPABILITY >= 89 or form.dtype == torch.int8]
    for count, dtype in product((1, 8, 16, 64, MIN_TALL_ROWS), dict.fromkeys([torch.bfloat16, *formats])):
        (cache,) = KVLayout(1, heads.num_kv, heads.dim, dtype).allocate(8, 16, CPU)
        table = torch.zeros((4, tokens.get(count, LONG_TABLE_TOKENS) // 16), dtype=torch.int32)
        column = torch.zeros(count, dtype=torch.int64)
        q = torch.empty((count, heads.num_q * heads.dim), dtype=torch.bfloat16)
        ops.forward.attention(q, Rows(column, column, column, column, table), heads, cache)


def for_families(
    ops: TritonOps, x: torch.Tensor, packed: PackedLinear, attention: Attention, qkv: torch.Tensor
) -> None:
    """Call the ops that only some model families use."""
    heads = attention.heads
    for activation in ACTIVATIONS[1:]:
        ops.forward.act_mul(x, activation)
        ops.forward.linear_act_mul(x, packed, activation)
    ops.forward.add(x, x)
    ops.forward.scale(x, 0.22)
    ops.forward.norm_add_rms_norm(x, x[0], x, x[0], 1e-6)
    q_norm = torch.empty(heads.num_q * heads.dim, dtype=x.dtype)
    k_norm = torch.empty(heads.num_kv * heads.dim, dtype=x.dtype)
    ops.forward.row_norms(qkv, replace(attention, q_row_norm=q_norm, k_row_norm=k_norm), 1e-6)


def step(ops: TritonOps, entries: int, k: int, vocab: int) -> None:
    """Call every op of a step in each of its variants."""
    from step_cases import PAGE, Guarded, Size, Step, masked, pool_of

    made = Step(1, Size(entries=entries, k=k, vocab=vocab, wide=64, letters=vocab))
    windows = made.windows(0, CPU)
    rows = len(windows.slot)
    logits, ints = torch.empty((rows, vocab)), torch.zeros(rows, dtype=torch.int64)
    ops.step.layout(made.plan, made.columns, PAGE, made.out(Guarded(CPU), 4 * entries, rows))
    ops.sampling.apply_penalties(logits, windows)
    ops.sampling.apply_bans(logits, windows)
    ops.sampling.apply_grammar_mask(logits, masked(made, windows))
    for scaled in (False, True):
        ops.sampling.sample(logits, windows, scaled)
    out = Outcome(torch.empty((entries, TOKENS + k + 1), dtype=torch.int64), ints, ints)
    for choice in (Choice(ints), Choice(ints, ints > 0), Choice(ints, ints > 0, ints)):
        ops.step.commit(made.plan, windows, choice, ints, out)
    for top in (0, 5, 20, 64):
        ops.sampling.logprobs(logits, ints, ints, top)
    ops.sampling.logprobs(
        logits, ints, ints, 0, None, NamedIds(ints[None].expand(4, -1).contiguous(), ints, 8)
    )
    of_rows = TokenLogprobs(torch.empty((rows, 1)), torch.empty((rows, 0), dtype=torch.int64), ints)
    kind = made.columns.draft_kind, 1
    ops.sampling.draft_logprobs(logits, ints[None], ints[None], 0, of_rows, kind=kind)
    batch = DeviceBatch(made.columns, made.plan.slots, made.plan.budget)
    tokens, count, _ = ops.search.search_ngram(batch, 1, 16)
    pool, rule = pool_of(made), SuffixOptions(2, 1.0, 0.1)
    for begun in (None, (tokens, count)):
        ops.search.search_suffix(batch, pool, rule, begun)
    transposed = torch.zeros_like(tokens.t()).t()
    candidates = [DraftCandidate(tokens, count, count), DraftCandidate(transposed, count, None)]
    counts = torch.zeros((2, entries, 2), dtype=torch.int64)
    record = AcceptanceRecord(torch.zeros((4, entries), dtype=torch.int64), *counts)
    for search in (-1, 0):
        ops.search.select_drafts(batch, record, candidates, search)
    for more in ({}, {"logprobs": torch.empty(tokens.shape), "sources": tokens.to(torch.int8)}):
        ops.step.store_drafts(made.columns, made.plan.slots, made.plan.budget, Draft(tokens, count, **more))


def drafts(ops: TritonOps, entries: int, k: int, vocab: int, hidden: int, columns: int) -> None:
    """Call the ops of the draft rounds of a head, besides its layer."""
    from step_cases import PAGE, Size, Step

    made = Step(1, Size(entries=entries, k=k, vocab=vocab, wide=64, letters=vocab))
    rows, last = ops.rounds.shift_rows(
        Rows(*torch.zeros((4, entries * (k + 1)), dtype=torch.int64), made.columns.page_table),
        made.columns,
        made.plan.slots,
    )
    for rounds in (0, k):
        batch = DeviceBatch(made.columns, made.plan.slots, made.plan.budget)
        ahead = ops.rounds.plan_draft_rows(batch, last, rounds, 1, PAGE)
    line = made.plan.slots
    windows = Windows(made.columns, line, line, line, line, line, line, line)
    x, norm = torch.empty((entries, hidden), dtype=torch.bfloat16), torch.empty(hidden, dtype=torch.bfloat16)
    packed = ops.forward.pack_linear(torch.empty((columns, hidden), dtype=torch.bfloat16))
    ids = torch.zeros(columns, dtype=torch.int64) if columns < vocab else None
    stored = torch.empty((k, entries, columns))
    for at, greedy, logits in ((None, False, None), (last, False, stored[0]), (None, True, None)):
        given = x, at, norm, 1e-6, packed, ids, windows, greedy, ahead.tokens[0]
        ops.rounds.lm_head_sample(*given, None, logits)
    part = None if ids is None else DraftVocab(ids, torch.zeros(vocab, dtype=torch.int64))
    held = [torch.zeros((entries + 1, k, *of), dtype=torch.int64) for of in ((), (64,))]
    for top in (0, 5):
        values = torch.empty((k * entries, 1 + top))
        best, ranks = torch.zeros((k * entries, top), dtype=torch.int64), ahead.tokens.new_empty(k * entries)
        ops.sampling.draft_logprobs(
            stored.view(-1, columns), ahead.slots, ahead.tokens, top, TokenLogprobs(values, best, ranks),
            temperature=made.columns.temperature, vocab=part,
        )  # fmt: skip
        shape = (k, entries)
        found = [each.view(*shape, -1).transpose(0, 1) for each in (ranks, best, values)]
        ranking = DraftRanking(found[0][..., 0], found[1], found[2][..., 1:])
        ops.step.store_ranking(
            DraftRanking(*held, torch.zeros((entries + 1, k, 64))), line, ranking if top else None
        )
    ops.forward.embed_norm_concat(
        line, torch.empty((vocab, hidden), dtype=torch.bfloat16), norm, x, norm, 1e-6
    )


def all_layers(
    ops: TritonOps, heads: AttentionShape, hidden: int, inner: int, count: int, taps: int = 0,
    joined: bool = False,
) -> None:  # fmt: skip
    def packed(columns: int, depth: int) -> PackedLinear:
        return ops.forward.pack_linear(torch.empty((columns, depth), dtype=torch.bfloat16))

    width, norm = heads.num_q * heads.dim, torch.empty(hidden, dtype=torch.bfloat16)
    projections = packed(width + 2 * heads.num_kv * heads.dim, hidden << joined), packed(hidden, width)
    mlp = packed(2 * inner, hidden), packed(hidden, inner)
    layer = Layer(norm, Attention(heads, *projections), norm, Mlp(*mlp))
    layers = [replace(layer, token_norm=norm)] if joined else [layer] * 4
    column, table = torch.zeros(count, dtype=torch.int64), torch.zeros((4, 128), dtype=torch.int32)
    cache = torch.empty((2, 8, 16, heads.num_kv, heads.dim), dtype=torch.bfloat16)
    rows, x = Rows(column, column, column, column, table), torch.empty((count, hidden), dtype=torch.bfloat16)
    with mock.patch("torch.cuda.is_current_stream_capturing", lambda: False):
        given = x, layers, norm, rows, torch.empty((64, heads.dim)), [cache] * len(layers), 1e-6
        run_layers(ops, *given, range(taps), x)


def quantized(ops: TritonOps, rows: int, columns: int, depth: int) -> None:
    """Call the ops with a weight of each quantised format."""
    integers = torch.empty((columns, depth), dtype=torch.int8)
    blocks, group = (-(-columns // 128), -(-depth // 128)), 128 if depth % 128 == 0 else 64
    groups, nibbles = (columns, depth // group), torch.empty((columns, depth // 2), dtype=torch.uint8)
    zeros = torch.empty(groups, dtype=torch.uint8)
    x = torch.empty((rows, depth), dtype=torch.bfloat16)
    for name, data, scales, points in (
        ("w8a8", integers, torch.empty(columns), None),
        ("fp8", integers.view(torch.float8_e4m3fn), torch.empty(columns), None),
        ("fp8_block", integers.view(torch.float8_e4m3fn), torch.empty(blocks), None),
        ("w4a16", nibbles, torch.empty(groups, dtype=torch.bfloat16), None),
        ("w4a16", nibbles, torch.empty(groups, dtype=torch.float16), zeros),
        ("mxfp4", nibbles, torch.empty((columns, depth // 32), dtype=torch.uint8), None),
    ):
        if name.startswith("fp8") and CAPABILITY < 89:
            continue
        packed = ops.forward.pack_quantized(name, data, scales, None, points)
        ops.forward.linear(x, packed)
        ops.forward.linear_act_mul(x, packed)
        ops.forward.add_rms_norm_input(x, x, x[0], 1e-6, packed)


def latent(ops: TritonOps, dtype: torch.dtype, rows: int, num_heads: int, rank: int) -> None:
    """Call the ops of latent attention in DeepSeek's widths; rank 0: no low-rank queries."""
    heads = AttentionShape(num_q=num_heads, num_kv=1, dim=576, scale=0.1, window=0, value_dim=512)
    kv_up = torch.empty((num_heads, 256, 512), dtype=dtype)
    norm = torch.empty(rank, dtype=dtype) if rank else None
    attention = LatentAttention(
        heads=heads,
        nope_dim=128,
        qkv=None,
        q_norm=norm,
        q_up=None,
        latent_norm=torch.empty(512, dtype=dtype),
        key_up=ops.forward.pack_heads(kv_up[:, :128].transpose(1, 2)),
        value_up=ops.forward.pack_heads(kv_up[:, 128:]),
        out=None,
        rope_pairs=True,
        norm_eps=1e-6,
    )
    column, table = torch.zeros(rows, dtype=torch.int64), torch.zeros((4, 512), dtype=torch.int32)
    these, rope = Rows(column, column, column, column, table), torch.empty((64, 64))
    (cache,) = KVLayout(1, 1, 576, dtype, planes=1).allocate(8, 16, CPU)
    qkv = torch.empty((rows, attention.q_columns + 576), dtype=dtype)
    q = ops.forward.latent_store(qkv, these, attention, rope, cache)
    q = torch.empty((rows, num_heads * 192), dtype=dtype) if rank else q
    queries = ops.forward.latent_queries(q, these, attention, rope)
    values = ops.forward.attention(queries, these, heads, cache)
    ops.forward.head_linear(values, attention.value_up)


def experts(ops: TritonOps, rows: int, rule: Routing, hidden: int, inner: int) -> None:
    """Call the ops of a mixture of experts, in bf16 and quantised."""
    x, count = torch.empty((rows, hidden), dtype=torch.bfloat16), rule.num_experts
    router = ops.forward.pack_router(torch.zeros((count, hidden), dtype=torch.bfloat16))

    def weights(name: str, columns: int, depth: int) -> PackedLinear:
        if name == "bf16":
            return ops.forward.pack_linear(torch.empty((columns, depth), dtype=torch.bfloat16))
        if name in FOUR_BITS:
            data, group = (
                torch.empty((columns, depth // 2), dtype=torch.uint8),
                32 if name == "mxfp4" else 128,
            )
            dtype = torch.uint8 if name == "mxfp4" else torch.bfloat16
            return ops.forward.pack_quantized(name, data, torch.empty((columns, depth // group), dtype=dtype))
        integers = torch.empty((columns, depth), dtype=torch.int8)
        data = integers if name == "w8a8" else integers.view(torch.float8_e4m3fn)
        return ops.forward.pack_quantized(name, data, torch.empty(columns))

    for name in ("bf16", "w8a8", *(["fp8"] if CAPABILITY >= 89 else []), *FOUR_BITS):
        gate_up, down = weights(name, count * 2 * inner, hidden), weights(name, count * hidden, inner)
        ops.forward.moe(x, Moe(rule, router, gate_up, down))
        ops.forward.moe_add_rms_norm(x, Moe(rule, router, gate_up, down), x, x[0], 1e-6)


def one_row_of_experts(ops: TritonOps) -> None:
    """Call all layers of a mixture of experts with one row."""
    heads = AttentionShape(num_q=32, num_kv=4, dim=128, scale=0.1, window=0)

    def packed(columns: int, depth: int) -> PackedLinear:
        return ops.forward.pack_linear(torch.empty((columns, depth), dtype=torch.bfloat16))

    norm, head_norm = torch.empty(2048, dtype=torch.bfloat16), torch.empty(128, dtype=torch.bfloat16)
    attention = Attention(heads, packed(5120, 2048), packed(2048, 4096), head_norm, head_norm)
    router = ops.forward.pack_router(torch.zeros((128, 2048), dtype=torch.bfloat16))
    moe = Moe(Routing(128, 8), router, packed(128 * 1536, 2048), packed(128 * 2048, 768))
    layer = Layer(norm, attention, norm, moe)
    column, table = torch.zeros(1, dtype=torch.int64), torch.zeros((4, 128), dtype=torch.int32)
    cache = torch.empty((2, 8, 16, 4, 128), dtype=torch.bfloat16)
    rows, x = Rows(column, column, column, column, table), torch.empty((1, 2048), dtype=torch.bfloat16)
    with mock.patch("torch.cuda.is_current_stream_capturing", lambda: False):
        found = ops.forward.fused_layers(x, [layer], rows, [torch.empty((64, 128))], [cache], 1e-6, (), None)
    assert found is not None


def one_row_of_a_dense_model(
    ops: TritonOps, heads: AttentionShape, hidden: int, inner: int, has_norms: bool
) -> None:
    """Call all layers of a dense model with one row; has_norms: norms of heads and of outputs."""

    def packed(columns: int, depth: int) -> PackedLinear:
        return ops.forward.pack_linear(torch.empty((columns, depth), dtype=torch.bfloat16))

    norm, head_norm = torch.empty(hidden, dtype=torch.bfloat16), torch.empty(heads.dim, dtype=torch.bfloat16)
    width = heads.num_q * heads.dim
    projections = packed(width + 2 * heads.num_kv * heads.dim, hidden), packed(hidden, width)
    attention = Attention(heads, *projections, *([head_norm] * 2 if has_norms else []))
    mlp = Mlp(packed(2 * inner, hidden), packed(hidden, inner), "gelu_tanh" if has_norms else "silu")
    layer = Layer(norm, attention, norm, mlp, *([norm] * 2 if has_norms else []))
    column, table = torch.zeros(1, dtype=torch.int64), torch.zeros((4, 128), dtype=torch.int32)
    cache = torch.empty((2, 8, 16, heads.num_kv, heads.dim), dtype=torch.bfloat16)
    rows, x = Rows(column, column, column, column, table), torch.empty((1, hidden), dtype=torch.bfloat16)
    with mock.patch("torch.cuda.is_current_stream_capturing", lambda: False):
        ropes = [torch.empty((64, heads.dim))]
        found = ops.forward.fused_layers(x, [layer], rows, ropes, [cache], 1e-6, (), None)
    assert found is not None


@contextlib.contextmanager
def replaced_launches(run: Callable[..., None]) -> Iterator[None]:
    """Call `run` for each launch, on a simulated GPU of compute capability CAPABILITY."""
    with (
        mock.patch.object(kernel_utils, "check_device", lambda device: None),
        mock.patch.object(kernel_utils, "_usable", lambda name, x, dtypes: x),
        mock.patch.object(JITFunction, "run", run),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda device: divmod(CAPABILITY, 10)),
        mock.patch("torch.cuda.get_device_properties", lambda device: Chip),
        mock.patch.object(Chip, "shared_memory_per_block_optin", SHARED_BYTES),
        mock.patch.object(TritonRuntime, "open_queue", lambda self: None, create=True),
    ):
        yield


def main() -> None:
    small = AttentionShape(num_q=9, num_kv=3, dim=64, scale=0.125, window=0)
    large = AttentionShape(num_q=32, num_kv=8, dim=128, scale=0.1, window=0)
    sliding = AttentionShape(num_q=32, num_kv=8, dim=128, scale=0.1, window=4096)
    with replaced_launches(compile_launch):
        for pdl in (False, CAPABILITY >= 90):
            ops = TritonOps(CPU, pdl=pdl)
            long_attention(ops, large)
            for rows in (1, 4, 64, 600):
                latent(ops, torch.bfloat16, rows, 16, 0)
                latent(ops, torch.bfloat16, rows, 128, 1536)
            if SHARED_BYTES >= MIN_FP32_SHARED_BYTES:
                latent(ops, torch.float32, 4, 16, 0)
            forward(ops, torch.bfloat16, 1, small, 576, 8192)
            forward(ops, torch.bfloat16, 64, small, 576, 8192)
            forward(ops, torch.bfloat16, 600, small, 576, 8192)
            step(ops, 256, 5, 49152)
            for entries in (1, 24, 256):
                drafts(ops, entries, 4, 49152, 576, 16384)
            drafts(ops, 1, 5, 49152, 576, 49152)
            if pdl:
                all_layers(ops, small, 576, 1536, 1)
                all_layers(ops, small, 576, 1536, 64)
                for rows in (1, 16, 64):
                    all_layers(ops, small, 576, 1536, rows, taps=3)
                    all_layers(ops, small, 576, 1536, rows, joined=True)
                if CAPABILITY == 90:
                    one_row_of_experts(ops)
                    one_row_of_a_dense_model(ops, large, 4096, 14336, has_norms=False)
                    wide = AttentionShape(num_q=8, num_kv=4, dim=256, scale=0.1, window=1024)
                    one_row_of_a_dense_model(ops, wide, 2560, 10240, has_norms=True)
                medium = AttentionShape(num_q=15, num_kv=5, dim=64, scale=0.1, window=0)
                all_layers(ops, medium, 960, 2560, 16)
                break
            forward(ops, torch.bfloat16, 600, large, 4096, 8192)
            forward(ops, torch.bfloat16, 4, sliding, 4096, 8192)
            forward(ops, torch.float32, 6, small, 576, 8192)
            logits = torch.empty((3, 49152))
            ints, floats = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
            ops.sampling.argmax(logits), ops.sampling.logsumexp(logits), ops.sampling.rank(logits, ints)
            ops.sampling.gumbel_argmax(logits, ints, ints, 0), ops.sampling.uniform(ints, ints, 1)
            ops.sampling.truncate(logits, ints, floats, floats)
            for vocab, k in ((49152, 1), (49152, 20), (128256, 64), (262208, 20)):
                ops.sampling.top(torch.empty((3, vocab)), k)
            with contextlib.suppress(RuntimeError, IndexError):  # what follows its kernel needs real keys
                ops.sampling.top(logits, 65)
        shapes = [(960, 576), (576, 1536), (3072, 576), (49152, 576), (6144, 4096), (28672, 4096)]
        for rows in (1, 8, 32, 64, 128, 256, 512, 1000):
            for columns, depth in shapes:
                x = torch.empty((rows, depth), dtype=torch.bfloat16)
                weight = torch.empty((columns, depth), dtype=torch.bfloat16)
                ops.forward.linear(x, PackedLinear(weight, None))
        for pdl in (False, CAPABILITY >= 90):
            ops = TritonOps(CPU, pdl=pdl)
            for rows in (1, 64, 256, 1000):
                for columns, depth in ((960, 576), (6144, 4096)):
                    quantized(ops, rows, columns, depth)
        grouped = {"num_groups": 8, "top_groups": 4, "group_score": "top2_sum"}
        for rows in (1, 64, 1000):
            experts(ops, rows, Routing(num_experts=128, top_k=8), 512, 256)
        experts(ops, 64, Routing(num_experts=256, top_k=8, scoring="sigmoid", **grouped), 256, 128)
        packed = ops.forward.pack_linear(torch.empty((960, 100)), torch.empty(960))
        for rows in (1, 64, 100):
            ops.forward.linear(torch.empty((rows, 100)), packed)


if __name__ == "__main__":
    main()
    for line in too_large:
        print(f"does not fit into {SHARED_BYTES} bytes: {line}")
    for line in permuted:
        print(f"operands are permuted: {line}")
    sys.exit(bool(too_large or permuted))
