"""Negative controls: defects planted in the engine, each of which the comparison must detect.

The reference run uses the broken engine too, so a difference means that speculation or batching changed the
output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch

from draftproof.engine.step import queued_logprobs
from draftproof.ops.torch import forward as torch_forward
from draftproof.ops.torch import kv
from draftproof.ops.torch.forward import TorchForward
from draftproof.types import PICK, Choice, Windows
from draftproof.verify import logits_processing
from draftproof.verify.target_match import TargetMatch
from exact import MANY_ENDS, OPTIONS, Batch, Case, Setup, plant

pytestmark = pytest.mark.control
PERFECT = {"method": "proposers:Perfect", "num_speculative_tokens": 5, "adaptive": False}
FLAKY = {"method": "proposers:Flaky", "num_speculative_tokens": 5, "adaptive": False}


def differences(case: Case, spec=FLAKY, setup=None, neighbours=(), chunk=64) -> list[str]:
    setup = setup or Setup()
    engine = setup.engine(spec, debug=False, max_num_batched_tokens=chunk)
    return Batch([*neighbours, case], setup, engine=engine).differences(fresh=True)


def check_detected(plant_defect: Callable[[], None], expected: str, case: Case, *given, **options) -> None:
    """Check that there is no difference before the defect is planted, and the expected one afterwards."""
    assert not differences(case, *given, **options)
    plant_defect()
    assert any(expected in line for line in differences(case, *given, **options))


def without_drafts(windows: Windows) -> Windows:
    """Return windows in which every row is the first, so that no row has drafts before it."""
    none = torch.zeros_like(windows.depth)
    return replace(windows, depth=none, position=windows.position - windows.depth)


@pytest.mark.parametrize("option", ["frequency", "presence", "repetition"])
def test_penalties_that_ignore_drafts_are_detected(monkeypatch, option):
    def broken(whole, ops, logits, windows):
        return whole(ops, logits, without_drafts(windows))

    case = Case(0, option, 0.7, length=20)
    check_detected(lambda: plant(monkeypatch, "apply_penalties", broken), "logprobs", case, PERFECT)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(lambda windows: torch.arange(len(windows.slot)), id="row"),
        pytest.param(lambda windows: windows.position - windows.depth, id="step"),
        pytest.param(lambda windows: windows.position + 100 * windows.slot, id="slot"),
    ],
)
def test_noise_with_the_wrong_key_is_detected(monkeypatch, key):
    def broken(layout, ops, plan, columns, page_size, out):
        layout(ops, plan, columns, page_size, out)
        out.windows.position.copy_(key(out.windows))

    case, neighbours = Case(0, "none", 1.3, length=20), [Case(1, "none", 1.3)]
    defect = lambda: plant(monkeypatch, "layout", broken)  # noqa: E731
    check_detected(defect, "request 0: tokens", case, neighbours=neighbours)


@pytest.mark.parametrize("what", ["drafts", "chunks", "neighbours"])
def test_gemm_whose_bits_depend_on_the_number_of_rows_is_detected(monkeypatch, what):
    """An error of one part in a million in fp32 changes no token, only logprobs."""
    whole = TorchForward.linear

    def broken(self, x, packed, out_dtype=None):
        return whole(self, x, packed, out_dtype) * (1 + 2**-20 * (len(x) % 3))

    spec, chunk = (FLAKY, 64) if what == "drafts" else (None, 16 if what == "chunks" else 64)
    neighbours = [Case(1, "none", 0.0)] if what == "neighbours" else []
    defect = lambda: monkeypatch.setattr(TorchForward, "linear", broken)  # noqa: E731
    options = {"setup": Setup(backend="torch"), "neighbours": neighbours, "chunk": chunk}
    check_detected(defect, "request 0: logprobs", Case(0, "none", 0.0, length=40), spec, **options)


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("what", ["batch", "page"])
def test_kv_scale_over_more_than_a_row_is_detected(monkeypatch, form, what):
    """Take the scale from the largest value of the call, or of its rows on one page."""
    store, quantize, groups = kv.store_kv, kv.quantize_rows, []

    def broken_store(cache, index, keys, values):
        groups[:] = [index // cache.shape[2] if what == "page" else torch.zeros_like(index)]
        store(cache, index, keys, values)

    def broken_quantize(rows, form):
        same = (groups[0][:, None] == groups[0])[:, :, None]  # [R, R, 1]
        top = torch.where(same, rows.abs().amax(-1)[None], 0.0).amax(1)  # [R, num_kv]
        elements, scales = quantize(torch.cat([rows, top[..., None]], -1), form)
        return elements[..., :-1].contiguous(), scales

    def defect():
        monkeypatch.setattr(torch_forward, "store_kv", broken_store)
        monkeypatch.setattr(kv, "quantize_rows", broken_quantize)

    setup = Setup(backend="torch", kv_cache_dtype=form)
    check_detected(defect, "request 0: logprobs", Case(0, "none", 0.0, length=20), setup=setup)


@pytest.mark.parametrize("what", ["one draft too many", "token of the wrong row"])
def test_wrong_acceptance_is_detected(monkeypatch, what):
    whole = TargetMatch.decide

    def broken(self, windows, scores):
        choice = whole(self, windows, scores)
        if what == "one draft too many":
            accepted = windows.draft == choice.token
            return replace(choice, accept=accepted | (accepted.roll(1) & (windows.depth > 0)))
        before = torch.where(windows.depth > 0, scores.sampled.roll(1), scores.sampled)
        return Choice(before, windows.draft == scores.sampled)

    monkeypatch.setattr(TargetMatch, "decide", broken)
    assert any("tokens" in line for line in differences(Case(0, "none", 0.7, length=20)))


def test_kv_of_rejected_drafts_is_detected(monkeypatch):
    """Store each position once, so that after a rejection the KV of the rejected draft is read."""
    newest_of = WeakKeyDictionary()

    def broken(layout, ops, plan, columns, page_size, out):
        layout(ops, plan, columns, page_size, out)
        rows, newest = out.rows, newest_of.get(ops, -1)
        rows.kv_index[rows.positions <= newest] = 0
        newest_of[ops] = max(newest, int(rows.positions.max()))

    check_detected(lambda: plant(monkeypatch, "layout", broken), "logprobs", Case(0, "none", 0.0, length=20))


def _computed_one_too_far(windows, out):
    real = windows.slots >= 0
    windows.columns.computed[windows.slots[real]] += windows.num_draft[real] > 0


def _logprobs_of_the_wrong_row(windows, out):
    real = out.pick_rows >= 0
    out.pick_rows[real] -= windows.depth[out.pick_rows[real]]


def _logprobs_of_the_first_entry(windows, out):
    out.table[:, PICK] = 0


@pytest.mark.parametrize(
    ("spoil", "spec", "case"),
    [
        (_computed_one_too_far, FLAKY, Case(0, "none", 0.0, length=20, k=3)),
        (_logprobs_of_the_wrong_row, PERFECT, Case(0, "none", 0.7, length=20)),
        (_logprobs_of_the_first_entry, PERFECT, Case(0, "none", 0.7, length=20)),
    ],
)
def test_wrong_commit_is_detected(monkeypatch, spoil, spec, case):
    def broken(commit, ops, plan, windows, choice, bad, out):
        commit(ops, plan, windows, choice, bad, out)
        spoil(windows, out)

    neighbours = [Case(1, "none", 0.7, length=9)] if spoil is _logprobs_of_the_first_entry else []
    defect = lambda: plant(monkeypatch, "commit", broken)  # noqa: E731
    check_detected(defect, "request 0: logprobs", case, spec, neighbours=neighbours)


def test_min_tokens_counted_at_the_start_of_the_window_is_detected(monkeypatch):
    options = {"min_tokens": 4, "stop_token_ids": MANY_ENDS, "logit_bias": {5: 30.0}}
    monkeypatch.setitem(OPTIONS, "ends", options)

    def broken(whole, ops, base, windows):
        return whole(ops, base, without_drafts(windows))

    case = Case(0, "ends", 0.7, length=20)
    check_detected(lambda: plant(monkeypatch, "apply_bans", broken), "tokens", case, PERFECT)


@pytest.mark.parametrize("option", ["bad_words", "processor"])
def test_context_without_drafts_is_detected(monkeypatch, option):
    whole = logits_processing._Contexts

    def defect():
        broken = lambda windows: whole(without_drafts(windows))  # noqa: E731
        monkeypatch.setattr(logits_processing, "_Contexts", broken)

    check_detected(defect, "logprobs", Case(0, option, 1.3, length=20), PERFECT)


def test_prompt_logprobs_that_ignore_the_chunk_are_detected(monkeypatch):
    """Score rows of a later chunk as if they were the first of the prompt."""
    whole = queued_logprobs._queue_prompt

    def broken(device, planned, b, computed, hidden):
        return whole(device, planned, b, 0, hidden)

    defect = lambda: monkeypatch.setattr(queued_logprobs, "_queue_prompt", broken)  # noqa: E731
    check_detected(defect, "prompt logprobs", Case(0, "none", 0.0, length=40), chunk=16)
