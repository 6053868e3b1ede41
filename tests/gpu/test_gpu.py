"""Exactness on a GPU: the matrix of test_exact.py with the triton backend; `make test-gpu` runs it.

Only torch, triton, numpy, safetensors, pytest and pytest-xdist are needed.
"""

from __future__ import annotations

import warnings
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import heads
import kv_checks
import tiny
from draftproof import SamplingParams
from draftproof.engine.slots import Slots
from draftproof.ops import Attention, AttentionShape, DraftVocab, Rows, TokenLogprobs, resolve
from draftproof.ops.triton.gemm.cublas import FP32_CALL_KINDS
from draftproof.propose.draft_rounds import DraftRounds
from draftproof.types import Windows
from exact import OPTIONS, Batch, Case, Setup
from exact_matrix import GRAMMAR_MATRIX, MATRIX, MXFP4_MATRIX, check, named

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


FORMATS = cycle(["int8", "fp8", "int4"])  # cases with quantised weights take turns at them


def with_format(case: dict[str, Any]) -> dict[str, Any]:
    """Return the case with the next format that is made on load, if its weights are quantised."""
    return case if case["quantization"] == "none" else {**case, "quantization": next(FORMATS)}


CASES = [with_format(case) for case in (*MATRIX, *GRAMMAR_MATRIX, *MXFP4_MATRIX)]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_outputs_equal_those_without_drafts(case: dict[str, Any]) -> None:
    check(case, "triton", device="cuda")


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral"])
def test_gemm_that_depends_on_the_row_count_is_detected(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    from draftproof.ops.triton.forward import TritonForward

    spec = {"method": "proposers:Flaky", "num_speculative_tokens": 5, "adaptive": False}
    setup = Setup(arch, "float32", "triton", device="cuda")
    cases = [Case(0, "none", 0.7, length=20)]
    assert Batch(cases, setup, spec).differences() == []
    linear = TritonForward.linear
    monkeypatch.setattr(TritonForward, "linear", lambda *a: linear(*a) * (1 + 1e-6 * (len(a[1]) % 3)))
    assert Batch(cases, setup, spec).differences(fresh=True)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("depth", [4096, 14336])
@torch.inference_mode()
def test_rows_of_cublas_have_the_bits_of_a_single_row(depth: int, out_dtype: torch.dtype) -> None:
    forward = resolve("triton", torch.device("cuda")).forward
    packed = forward.pack_linear((torch.randn(4096, depth, device="cuda") / depth**0.5).bfloat16())
    for rows in (96, 192, 256):
        x = torch.randn(rows, depth, device="cuda").bfloat16()
        outputs = [forward.linear(x, packed, out_dtype)]
        for kind in FP32_CALL_KINDS:
            if forward.cublas._has_equal_bits(packed, rows, out_dtype, kind):
                outputs.append(torch.empty_like(outputs[0]))
                forward.cublas.multiply(x, packed.weight, outputs[-1], kind)
        for row in (0, rows // 2, rows - 1):
            alone = forward.linear(x[row : row + 1], packed, out_dtype)[0]
            assert all(torch.equal(found[row], alone) for found in outputs)


class OnDevice:
    """Forward ops of a device, called with tensors of the host."""

    def __init__(self, backend: str, device: str) -> None:
        self.ops, self.device = resolve(backend, torch.device(device)), device
        self.forward = self

    def _moved(self, rows: Rows) -> Rows:
        columns = rows.tokens, rows.positions, rows.slots, rows.kv_index, rows.page_table
        return Rows(*(column.to(self.device) for column in columns))

    def rope_store(
        self, qkv: Tensor, rows: Rows, attention: Attention, rope: Tensor, cache: Tensor, eps: float
    ) -> Tensor:
        stored, table = cache.to(self.device), rope.to(self.device)
        op = self.ops.forward.rope_store
        q = op(qkv.to(self.device), self._moved(rows), attention, table, stored, eps)
        cache.view(torch.uint8).copy_(stored.view(torch.uint8))
        return q.cpu()

    def attention(self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor) -> Tensor:
        op = self.ops.forward.attention
        return op(q.to(self.device), self._moved(rows), heads, cache.to(self.device)).cpu()


@pytest.mark.parametrize("kv_dtype", kv_checks.KV_DTYPES, ids=str)
@pytest.mark.parametrize("heads", kv_checks.HEADS.values(), ids=kv_checks.HEADS)
def test_quantised_kv_equals_the_reference(kv_dtype: torch.dtype, heads: AttentionShape) -> None:
    ops: Any = OnDevice("triton", "cuda")
    kv_checks.check_stored_bytes(ops, kv_dtype, torch.bfloat16, heads)
    kv_checks.check_attention(ops, kv_dtype, torch.bfloat16, heads)
    for length in (199, 700):  # more than 512 rows of a call are divided into taller tiles
        kv_checks.check_rows_are_independent(ops, kv_dtype, torch.bfloat16, heads, length)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_head_drafts_are_captured_with_fused_kernels(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a model and a head of sizes that the fused kernels support."""
    sizes = {"hidden_size": 64, "head_dim": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64}
    monkeypatch.setitem(tiny.ARCHITECTURES, "even", {"architecture": "LlamaForCausalLM", **sizes})
    config = heads.head_config("eagle3", "even", "bfloat16", **sizes)
    head = heads.save_head("even", config, heads.head_tensors(config))
    cases = [Case(i, "none", temperature, length=14 + 9 * i, prompt=False) for i in range(5)]
    setup = Setup("even", "bfloat16", "triton", device="cuda")
    spec = {"method": "eagle3", "model": head, "num_speculative_tokens": 4, "adaptive": False}
    for how in ({"overlap": True, "arrivals": [0, 0, 2, 3, 5]}, {"chunk": 8, "overlap": False}):
        batch = Batch(cases, setup, spec, **how)
        assert batch.differences() == []
        device = batch.engine.loop.device  # type: ignore[union-attr]
        assert device.drafting.failure is None
        assert any(key.kind == "draft" for key in device.graphs.captured)
        assert device.ops.forward._fused_layers.supports(
            torch.zeros((1, 64), dtype=torch.bfloat16), device.runner.model.layers
        )
        steps = [step for record in batch.records.values() for step in record.steps]
        assert sum(step.num_draft for step in steps) > 20


@pytest.mark.parametrize("width", [16384, 49152])
@torch.inference_mode()
def test_logprobs_of_drafts_have_the_bits_of_a_single_row(width: int) -> None:
    """Compare stored logits with those of `linear`, and logprobs of many drafts with those of one alone.

    A row is divided by its temperature in the kernel, or before it where another request truncates.
    """
    ops, hidden, vocab, most = resolve("triton", torch.device("cuda")), 576, 49152, 256
    packed = ops.forward.pack_linear((torch.randn(width, hidden, device="cuda") / hidden**0.5).bfloat16())
    norm, ids, part = torch.rand(hidden, device="cuda").bfloat16(), None, None
    if width < vocab:
        ids = torch.randperm(vocab, device="cuda")[:width].sort().values
        places = torch.full((vocab,), -1, device="cuda")
        part = DraftVocab(ids, places.index_copy_(0, ids, torch.arange(width, device="cuda")))
    slots = torch.arange(most, device="cuda")
    columns: Any = SimpleNamespace(temperature=torch.rand(most, device="cuda") + 0.3, seed=slots)
    x = 4 * torch.randn(most, hidden, device="cuda").bfloat16()
    normed = ops.forward.rms_norm(x, norm, 1e-5)
    alone = torch.cat([ops.forward.linear(normed[i : i + 1], packed, torch.float32) for i in range(most)])

    def logprobs(logits: Tensor, line: Tensor, drafts: Tensor, is_divided: bool) -> TokenLogprobs:
        shape = len(line), 5
        ranks, values = torch.empty_like(line), torch.empty((len(line), 6), device="cuda")
        out, temperature = TokenLogprobs(values, line.new_empty(shape), ranks), columns.temperature
        if is_divided:
            logits, temperature = logits / temperature[line][:, None], None
        given = line[None], drafts[None]
        ops.sampling.draft_logprobs(logits, *given, 5, out, temperature=temperature, vocab=part)
        return out

    for count in (1, 5, 16, 24, 64, 200, 256):
        line, drafts = slots[:count], torch.zeros_like(slots[:count])
        windows = Windows(columns, line, line, line, line, line, line, line)
        logits = torch.empty((count, width), device="cuda")
        given = x[:count], None, norm, 1e-5, packed, ids, windows, False, drafts
        ops.rounds.lm_head_sample(*given, None, logits)
        assert torch.equal(logits, alone[:count])
        for i in (0, count // 2, count - 1):
            own = logprobs(alone[i : i + 1], line[i : i + 1], drafts[i : i + 1], is_divided=False)
            for is_divided in (False, True):
                found = logprobs(logits, line, drafts, is_divided)
                for mine, theirs in zip(own.tensors, found.tensors, strict=True):
                    assert torch.equal(mine[0], theirs[i])


def drafts_beside(options: list[str], method: str) -> list[Any]:
    """Return the drafts of the first two requests of a batch, which do not truncate."""
    spec = {"method": method, "model": heads.head(method), "num_speculative_tokens": 3, "adaptive": False}
    cases = [Case(i, name, (0.7, 1.3)[i % 2], length=20, prompt=False) for i, name in enumerate(options)]
    batch = Batch(cases, Setup("llama", "bfloat16", "triton", device="cuda"), spec, overlap=True)
    assert batch.differences() == []
    return [
        (draft.token_id, draft.position, draft.draft_logprob, draft.draft_rank, draft.draft_top)
        for name in ("0", "1")
        for step in batch.records[name].steps
        for draft in step.drafts or []
    ]


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_logprobs_of_drafts_do_not_depend_on_truncating_neighbours(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: logprobs over the whole vocabulary beside a request that truncates."""
    fields = {"include_draft_logprobs": True, "logprobs": 3, "ignore_eos": True}
    monkeypatch.setitem(OPTIONS, "ranked", fields)
    monkeypatch.setitem(OPTIONS, "truncated", {**fields, "top_k": 5, "logprobs_mode": "processed"})
    alone = drafts_beside(["ranked"] * 2, method)
    assert len(alone) > 15 and drafts_beside(["ranked", "ranked", "truncated"], method) == alone
    if method == "eagle3":  # its vocabulary is a part of the target's
        sample = DraftRounds.sample
        monkeypatch.setattr(DraftRounds, "sample", lambda self, j, logits, vocab: sample(self, j, logits))
        assert drafts_beside(["ranked", "ranked", "truncated"], method) != alone


def waits(speculative: dict[str, Any] | None) -> list[str]:
    """Return the places where the host waited for the device other than to read the results of a step.

    All steps were captured before; requests start and finish during the run.
    """
    options = {"backend": "triton", "device": "cuda", "max_num_seqs": 3, "overlap": True}
    engine = tiny.engine(dtype="bfloat16", speculative=speculative, **options)
    params = SamplingParams(temperature=0.7, max_tokens=20, logprobs=2, ignore_eos=True)
    for mode in ("default", "warn"):  # the first run captures the steps
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode(mode)
            try:
                tiny.run(engine, [tiny.request(i, params, length=12 + 5 * i) for i in range(8)])
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return [f"{one.filename}:{one.lineno}" for one in found if "synchronizing" in str(one.message)]


@pytest.mark.parametrize("method", [None, "ngram"])
def test_host_waits_only_to_read_results(method: str | None) -> None:
    assert waits({"method": method, "num_speculative_tokens": 3, "adaptive": False} if method else None) == []


def test_hidden_wait_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the fill of slots reads a value from the device."""
    fill = Slots.fill

    def fill_and_wait(self: Slots, requests: Any) -> None:
        fill(self, requests)
        self.columns.length[0].item()

    monkeypatch.setattr(Slots, "fill", fill_and_wait)
    assert waits(None)
