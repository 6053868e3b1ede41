"""Launches of a head's drafts, none of which waits for the device; no GPU is needed.

Triton launches are replaced by a count, torch's ops are counted as dispatched; tensors hold anything.
"""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import heads
import tiny
from draftproof.config import EngineConfig
from draftproof.engine.parallel.rank_checkpoint import cut_checkpoint, plan_cuts
from draftproof.models.draft_head.model import DraftHeadModel, TargetParts
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
from draftproof.models.weight_formats import FloatWeight
from draftproof.ops import KVLayout
from draftproof.ops.contract.communicator import Communicator
from draftproof.ops.contract.kv_layout import resolve_kv_dtype
from draftproof.ops.parallel.forward import use_communicator
from draftproof.propose import ProposerEnv
from draftproof.propose.head import Eagle3Proposer
from draftproof.types import DeviceBatch, Draft, DraftSpec, Rows
from no_gpu import simulate_gpu
from step_cases import PAGE, Size, Step

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs triton, and no GPU"
)
CPU = torch.device("cpu")
K = 4
LONG_PAGE = 16  # tokens: the minimum of the kernel for quantised KV
SMALL = {"hidden_size": 64, "head_dim": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64}
# Ops of torch that launch nothing.
FREE = ("view", "slice", "select", "aten.t.", "split", "unsqueeze", "empty", "unbind", "detach", "alias")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "item", "equal.default")


class Launches(TorchDispatchMode):
    """Counts of launches by name; Triton kernels do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def kernel(self, function: Any, *given: Any, **options: Any) -> None:
        self.found[function.fn.__name__] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if not any(free in name for free in FREE):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))

    @property
    def waits(self) -> list[str]:
        return [name for name in self.found if any(wait in name for wait in WAITS)]


@pytest.fixture
def triton_ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the backend as on a GPU of 132 processors."""
    from triton.runtime.jit import JITFunction

    from draftproof.ops.triton.backend import TritonOps

    simulate_gpu(monkeypatch)
    launches = Launches()
    empty = torch.empty

    def zeroed(*given: Any, **options: Any) -> torch.Tensor:
        made = empty(*given, **options)
        with _disable_current_modes():
            return made.zero_()  # tables must hold valid indices

    monkeypatch.setattr(torch, "empty", zeroed)
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: launches.kernel(self, *a, **k))
    ops = TritonOps(CPU, cublas="never")
    ops.launches = launches  # type: ignore[attr-defined]
    return ops


@pytest.fixture
def proposer(triton_ops: Any, monkeypatch: pytest.MonkeyPatch) -> Eagle3Proposer:
    monkeypatch.setitem(tiny.ARCHITECTURES, "even", {"architecture": "LlamaForCausalLM", **SMALL})
    config = heads.head_config("eagle3", "even", "bfloat16", **SMALL)
    head = heads.save_head("even", config, heads.head_tensors(config))
    made = tiny.checkpoint("even", "bfloat16")
    parts = TargetParts(
        *(made.config, config.target, torch.bfloat16, made.tensors["model.embed_tokens.weight"], None),
        lm_head_rows=lambda ids: torch.zeros((len(ids), SMALL["hidden_size"]), dtype=torch.bfloat16),
    )
    env = ProposerEnv(triton_ops, K, tiny.VOCAB, SMALL["hidden_size"], 256, 9, PAGE, 64, 2048, parts)
    return Eagle3Proposer(env, {"model": head})


def launches_of(proposer: Eagle3Proposer, entries: int, rounds: int = K, **traits: Any) -> Launches:
    """Count launches of drafts behind a step in which `entries` requests verified K drafts each."""
    ops, size = proposer.env.ops, Size(entries=entries, k=K, vocab=tiny.VOCAB, wide=64)
    step, count = Step(1, size), entries * (K + 1)
    rows = Rows(*torch.zeros((4, count), dtype=torch.int64), step.columns.page_table)
    features = torch.zeros((count, 2 * SMALL["hidden_size"]), dtype=torch.bfloat16)
    plan, wanted = step.plan, DraftSpec(rounds, **traits)
    batch = DeviceBatch(step.columns, plan.slots, plan.budget, plan.chunk, rows, features, wanted)
    launches: Launches = ops.launches  # type: ignore[attr-defined]
    proposer.draft(batch)  # allocates scratch and tables
    launches.found.clear()
    with launches:
        made: Draft = proposer.draft(batch)
        ops.step.store_drafts(step.columns, plan.slots, plan.budget, made)
    return launches


@pytest.mark.parametrize("entries", [1, 16])
def test_few_rows_need_two_launches_a_round(proposer: Eagle3Proposer, entries: int) -> None:
    found = launches_of(proposer, entries).found
    assert found == {
        "shift_rows_kernel": 1, "plan_draft_rows_kernel": 1, "linear_kernel": 1, "fused_layers_kernel": K,
        "lm_head_sample_kernel": K,
        "store_drafts_kernel": 1,
    }  # fmt: skip


@pytest.mark.parametrize("entries", [1, 16])
def test_logprobs_of_drafts_need_two_launches(proposer: Eagle3Proposer, entries: int) -> None:
    plain = launches_of(proposer, entries).found.copy()
    found = launches_of(proposer, entries, needs_logprobs=True, top=5)
    added = {name: n for name, n in (found.found - plain).items() if name != "aten.transpose.int"}  # a view
    assert added == {"logprob_scan_kernel": 1, "logprob_finish_kernel": 1} and not found.waits, added


def test_many_rows_need_few_launches_more(proposer: Eagle3Proposer) -> None:
    found = launches_of(proposer, 64).found
    assert found["fused_layers_kernel"] == K == found["lm_head_sample_kernel"] and found.total() <= 17, found
    many = launches_of(proposer, 256)
    assert many.found.total() <= 6 + 12 * K and not many.waits, many.found


def test_drafting_without_rounds_needs_five_launches(proposer: Eagle3Proposer) -> None:
    found = launches_of(proposer, 64, rounds=0).found
    assert found.total() == 5 and "fused_layers_kernel" not in found, found


@pytest.mark.parametrize(
    "traits", [{}, {"needs_processed": True}, {"needs_logprobs": True}, {"needs_probs": True}]
)
@pytest.mark.parametrize("entries", [1, 64])
def test_drafting_never_waits_for_the_device(
    proposer: Eagle3Proposer, entries: int, traits: dict[str, bool]
) -> None:
    assert launches_of(proposer, entries, **traits).waits == []


def test_control_wait_is_detected(proposer: Eagle3Proposer, monkeypatch: pytest.MonkeyPatch) -> None:
    shift_rows = type(proposer.env.ops.rounds).shift_rows

    def waits(self: Any, *given: Any) -> Any:
        rows, last = shift_rows(self, *given)
        return rows, last[last >= 0] if bool((last > 5).any()) else last

    monkeypatch.setattr(type(proposer.env.ops.rounds), "shift_rows", waits)
    assert launches_of(proposer, 1).waits


def test_taps_need_no_launch(triton_ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.ARCHITECTURES, "even", {"architecture": "LlamaForCausalLM", **SMALL})
    counts = []
    for taps in ((), (0, 1)):
        made = tiny.checkpoint("even", "bfloat16")
        model = create_model(made.config, made.weights, triton_ops, 64)
        runner = Runner(model, triton_ops, made.dtype, num_pages=9, page_size=PAGE, max_rows=32, taps=taps)
        column, table = torch.zeros(5, dtype=torch.int64), torch.zeros((4, 16), dtype=torch.int32)
        rows = Rows(column, column, column, column, table)
        runner.forward(rows)
        triton_ops.launches.found.clear()
        with triton_ops.launches:
            runner.forward(rows)
        counts.append(dict(triton_ops.launches.found))
    assert counts[0] == counts[1] == {"embed_kernel": 1, "fused_layers_kernel": 1, "rms_norm_kernel": 1}


class TwoRanks(Communicator):
    """Rank 0 of two; the other one's tensors are the same."""

    size = 2

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x])


def attention_passes(
    triton_ops: Any,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str = "llama",
    num_ranks: int = 1,
    kv_cache_dtype: str = "auto",
    **fields: Any,
) -> list[list[Any]]:
    """Return the kernels of each pass of a decoder or head whose attention is that of few rows on Hopper."""
    from triton.runtime.jit import JITFunction

    from draftproof.ops.triton.attention import warp_specialized

    sizes = {**SMALL, "head_dim": 128, "num_heads": 4, "num_kv_heads": 2}
    monkeypatch.setattr(triton_ops.forward, "one_launch", False)
    name = f"long {architecture}"
    monkeypatch.setitem(tiny.ARCHITECTURES, name, {**tiny.ARCHITECTURES[architecture], **sizes})
    passes: list[list[Any]] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: passes[-1].append(self))
    monkeypatch.setattr(triton_ops.forward, "begin_pass", lambda rows: passes.append([]))
    made, column = tiny.checkpoint(name, "bfloat16"), torch.zeros(5, dtype=torch.int64)
    table = torch.zeros((4, warp_specialized.LONG_TABLE_TOKENS // LONG_PAGE), dtype=torch.int32)
    rows = Rows(column, column, column, column, table)
    if num_ranks > 1:
        engine = EngineConfig(model=name, tensor_parallel_size=num_ranks)
        use_communicator(triton_ops, TwoRanks())
        made = cut_checkpoint(engine, made, triton_ops, plan_cuts(engine, made, triton_ops, rank=0))
    if kind == "decoder":
        model = create_model(made.config, made.weights, triton_ops, 64)
        options = {"num_pages": 9, "page_size": LONG_PAGE, "max_rows": 32, "kv_cache_dtype": kv_cache_dtype}
        Runner(model, triton_ops, made.dtype, captures=False, **options).forward(rows)
        return passes
    config = heads.head_config(kind, name, "bfloat16", **sizes, share_lm_head=True, **fields)
    embedding = made.tensors["model.embed_tokens.weight"]
    target = (made.config, config.target, torch.bfloat16, embedding, None)
    parts = TargetParts(*target, lm_head_rows=lambda ids: embedding[ids])
    tensors = {name: FloatWeight(tensor) for name, tensor in heads.head_tensors(config).items()}
    head = DraftHeadModel(config, tensors, triton_ops, 64, parts, 8)
    kv_dtype = resolve_kv_dtype(kv_cache_dtype, torch.bfloat16)
    caches = KVLayout(config.num_layers, 2, 128, kv_dtype).allocate(9, LONG_PAGE, CPU)
    feature = torch.zeros((5, SMALL["hidden_size"]), dtype=torch.bfloat16)
    head.forward(rows, feature, caches)
    return passes


def store_launches(
    triton_ops: Any, kind: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> list[Any]:
    """Return the kernels of a head that stores KV without drafting."""
    store = DraftHeadModel.store

    def stored(self: DraftHeadModel, rows: Rows, feature: Any, caches: Any) -> Any:
        self.ops.forward.begin_pass(rows)  # begins the list of kernels
        store(self, rows, feature, caches)

    monkeypatch.setattr(DraftHeadModel, "forward", stored)
    return attention_passes(triton_ops, kind, monkeypatch, **fields)[-1]


@pytest.mark.parametrize(
    ("kind", "fields"), [("eagle3", {}), ("eagle3", {"norm_before_residual": True}), ("mtp", {})]
)
def test_stored_rows_wait_for_earlier_kernels(
    kind: str, fields: dict[str, Any], triton_ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check what kernels that store KV rely on: they may read slots and positions before their wait."""
    kernels = store_launches(triton_ops, kind, monkeypatch, fields)
    names = [kernel.fn.__name__ for kernel in kernels]
    stores = [name for name in names if name in ("rope_store_kernel", "fused_linear_kernel")]
    first = names.index(stores[0])
    assert any("pdl_begin_pass(PDL)" in kernel.src for kernel in kernels[:first])


PASSES: list[tuple[str, dict[str, Any]]] = [
    ("decoder", {}),
    ("decoder", {"architecture": "mixtral"}),
    ("decoder", {"architecture": "qwen3_moe"}),
    ("decoder", {"architecture": "gemma3"}),
    ("decoder", {"num_ranks": 2}),
    ("decoder", {"architecture": "qwen3_moe", "num_ranks": 2}),
    ("decoder", {"architecture": "gemma3", "num_ranks": 2}),
    ("eagle3", {}),
    ("eagle3", {"norm_before_residual": True}),
    ("eagle", {}),
    ("mtp", {}),
]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "attention"), [("auto", "few_rows_kernel"), ("int8", "quantized_rows_kernel")]
)
@pytest.mark.parametrize(("kind", "fields"), PASSES)
def test_passes_wait_for_earlier_kernels_before_their_first_attention(
    kind: str,
    fields: dict[str, Any],
    kv_cache_dtype: str,
    attention: str,
    triton_ops: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check what some kernels rely on: they read slots, positions and old keys before their wait."""
    passes = attention_passes(triton_ops, kind, monkeypatch, kv_cache_dtype=kv_cache_dtype, **fields)
    assert passes
    for kernels in passes:
        names = [kernel.fn.__name__ for kernel in kernels]
        assert attention in names
        first = min(names.index(name) for name in ("rope_store_kernel", attention) if name in names)
        assert any("pdl_begin_pass(PDL)" in kernel.src for kernel in kernels[:first])
