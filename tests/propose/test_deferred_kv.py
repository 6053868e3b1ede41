"""Draft model that does not run behind steps without drafts: the KV that it stores later must be complete.

The draft model has the target's weights, so every draft must be accepted.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from test_draft_model import HARD, PLAIN, count_accepted, serve

import heads
from draftproof import SamplingParams
from draftproof.engine.drafting import deferred_kv
from draftproof.engine.drafting.policy import DraftDecision, DraftPolicy
from draftproof.propose.draft_model import DraftModelProposer
from exact import OPTIONS, Setup
from tiny import request, run

PERIOD = 4  # steps


@pytest.fixture(autouse=True)
def _long(monkeypatch):
    monkeypatch.setitem(OPTIONS, "long", {"ignore_eos": True, "max_tokens": 24})


@pytest.fixture(params=["all", "one", "others"])
def rare_drafts(request, monkeypatch):
    """Let drafts be made in every PERIOD-th decision alone: for all requests, one in turn, or all but it."""
    decide, calls = DraftPolicy.decide, []

    def decide_rarely(self: DraftPolicy, slots: Any, *args: Any, **options: Any) -> DraftDecision:
        calls.append(None)
        made = decide(self, slots, *args, **options)
        number, left_over = divmod(len(calls), PERIOD)
        if left_over:
            return DraftDecision(np.zeros_like(slots))
        if request.param == "all":
            return made
        is_chosen = (slots == number % (int(slots.max()) + 1)) == (request.param == "one")
        drafts = np.where(is_chosen, made.drafts, 0)
        return made._replace(drafts=drafts, rounds=made.rounds if drafts.any() else 0)

    monkeypatch.setattr(DraftPolicy, "decide", decide_rarely)
    return request.param


CASES = {
    "plain": PLAIN,
    "sampled": PLAIN | {"temperature": 1.0, "k": 5, "reject": True},
    "prefix hits": PLAIN | {"prefix": "hit", "chunk": 16},
    "preempted": HARD,
    "bfloat16": HARD | {"dtype": "bfloat16", "arch": "qwen3", "overlap": True},
}


@pytest.mark.parametrize("name", CASES)
def test_every_right_draft_is_accepted_after_steps_without_drafts(name, rare_drafts):
    num_accepted, wrong = count_accepted(serve(CASES[name]), CASES[name]["reject"])
    assert not wrong, wrong[:4]
    assert num_accepted or rare_drafts == "others"  # a request that runs alone gets none then


def test_every_right_draft_is_accepted_where_few_can_catch_up_at_once(rare_drafts, monkeypatch):
    monkeypatch.setattr(deferred_kv, "CATCH_UP_ROWS", (4,))
    num_accepted, wrong = count_accepted(serve(CASES["sampled"]), True)
    assert num_accepted and not wrong, wrong[:4]


@pytest.mark.parametrize("name", ["sampled", "preempted"])
def test_every_right_draft_is_accepted_in_captured_padded_steps(name, rare_drafts):
    case = CASES[name] | {"overlap": True}
    num_accepted, wrong = count_accepted(serve(case, "padded_ops:PaddedOps"), case["reject"])
    assert not wrong, wrong[:4]
    assert num_accepted or rare_drafts == "others"  # a request that runs alone gets none then


@pytest.mark.parametrize("kind", ["alone", "prediction", "hybrid"])
def test_count_of_tokens_without_kv_is_an_upper_bound(kind, monkeypatch):
    """Compare it with the device where drafts of other sources are verified while the model does not run."""
    decide, calls = DraftPolicy.decide, []

    def decide_rarely(self: DraftPolicy, slots: Any, *args: Any, **options: Any) -> DraftDecision:
        calls.append(None)
        made = decide(self, slots, *args, **options)
        if len(calls) % PERIOD == 0:
            return made
        return made._replace(rounds=0) if kind == "hybrid" else DraftDecision(np.zeros_like(slots))

    monkeypatch.setattr(DraftPolicy, "decide", decide_rarely)
    model = {"method": "draft_model", "model": heads.target_copy("llama", "float32")}
    spec = {"method": "hybrid", "proposers": [model, {"method": "ngram"}]} if kind == "hybrid" else model
    spec = {**spec, "num_speculative_tokens": 3, "adaptive": False}
    backend = "padded_ops:PaddedOps" if kind == "hybrid" else "auto"
    engine = Setup(backend=backend).engine(spec, page_size=8)
    bias = {5: 100.0} if kind == "hybrid" else None  # one token, which a search finds
    params = SamplingParams(max_tokens=48, ignore_eos=True, logit_bias=bias)
    prompts = [heads.tiny.prompt(i, 12 + i) for i in range(4)]
    requests = [request(i, params, prompt_token_ids=ids) for i, ids in enumerate(prompts)]
    plain = run(Setup().engine(page_size=8), requests)
    if kind == "prediction":
        requests = [replace(one, prediction_ids=plain[one.id].token_ids) for one in requests]
    device, scheduler = engine.loop.device, engine.loop.scheduler
    proposer, step, checked = device.drafting.proposer, engine.loop.step, []
    stored = (proposer.members[0] if kind == "hybrid" else proposer)._stored

    def step_and_compare():
        results = step()
        for slot in (each.slot for each in scheduler.running):
            if not scheduler.mirror.prompt_left[slot]:
                missing = int(device.slots.columns.length[slot] - stored[slot])
                checked.append(missing <= device.deferred_kv._num_tokens[slot])
        return results

    monkeypatch.setattr(engine.loop, "step", step_and_compare)
    found = run(engine, requests)
    assert len(checked) > 20 and all(checked)
    assert [found[i].token_ids for i in found] == [plain[i].token_ids for i in found]


@pytest.mark.parametrize("bug", ["one token less", "token", "none"])
@pytest.mark.parametrize("rare_drafts", ["all"], indirect=True)
def test_control_defect_in_deferred_kv_loses_drafts(bug, rare_drafts, monkeypatch):
    """Change what is stored later, or store nothing: drafts are rejected, or fewer are made."""
    case = PLAIN | {"temperature": 1.0, "chunk": 8}
    right, _ = count_accepted(serve(case), False)
    rows, catch_up = DraftModelProposer._rows, DraftModelProposer.catch_up
    if bug == "one token less":

        def lose_first(self, columns, slots, begin, count, size):
            is_late = count > 1
            return rows(self, columns, slots, begin + is_late, count - is_late.long(), size)

        monkeypatch.setattr(DraftModelProposer, "_rows", lose_first)
    if bug == "token":

        def store_wrong(self, columns, slots, num_rows):
            catch_up(self, replace(columns, tokens=(columns.tokens + 1) % 97), slots, num_rows)

        monkeypatch.setattr(DraftModelProposer, "catch_up", store_wrong)
    if bug == "none":
        monkeypatch.setattr(DraftModelProposer, "catch_up", lambda *_: None)
    num_accepted, wrong = count_accepted(serve(case), False)
    assert wrong or num_accepted < right


def without_drafts() -> Any:
    """Return a patch under which the policy gives no drafts to requests that may have some."""
    return mock.patch.object(DraftPolicy, "decide", lambda self, slots, *_, **__: DraftDecision(0 * slots))


def turns(
    chunk: int, overlap: bool, backend: str = "auto", stores_prompts: bool = False
) -> tuple[int, int, int]:
    """Run a conversation: two turns without drafts and one with them, each on the tokens of the last.

    Return the cached tokens, the drafts and the accepted drafts of the last turn. Another request before it
    takes free pages. stores_prompts: all turns have speculation, so that KV of the prompts is stored.
    """
    model = {"method": "draft_model", "model": heads.target_copy("llama", "float32"), "adaptive": False}
    sizes = {"page_size": 8, "kv_cache_tokens": 160, "max_num_batched_tokens": chunk, "overlap": overlap}
    engine = Setup(backend=backend).engine({**model, "num_speculative_tokens": 3}, **sizes)
    ids, record = heads.tiny.prompt(0, 20), None
    for number, enabled in enumerate((False, False, None, True)):
        if enabled is None:
            other = SamplingParams(max_tokens=24, ignore_eos=True, speculative={"enabled": False})
            run(engine, [request(9, other, prompt_token_ids=heads.tiny.prompt(9, 12))])
            continue
        speculation = {"enabled": enabled or stores_prompts}
        params = SamplingParams(max_tokens=18, ignore_eos=True, speculative=speculation)
        before = engine.stats().num_cached_tokens
        with nullcontext() if enabled else without_drafts():
            record = run(engine, [request(number, params, prompt_token_ids=ids)])[str(number)]
        ids = [*ids, *record.token_ids, 9, 9]
    assert record is not None
    steps, cached = record.steps, engine.stats().num_cached_tokens - before
    return cached, sum(step.num_draft for step in steps), sum(step.num_accepted for step in steps)


@pytest.mark.parametrize("backend", ["auto", "padded_ops:PaddedOps"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [8, 512])
def test_cached_pages_without_kv_are_completed(chunk, overlap, backend):
    cached, num_drafts, num_accepted = turns(chunk, overlap, backend)
    assert cached >= 48 and num_drafts == num_accepted > 0


@pytest.mark.parametrize("backend", ["auto", "padded_ops:PaddedOps"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [8, 512])
def test_cached_pages_with_kv_of_the_prompt_alone_are_completed(chunk, overlap, backend):
    cached, num_drafts, num_accepted = turns(chunk, overlap, backend, stores_prompts=True)
    assert cached >= 48 and num_drafts == num_accepted > 0


@pytest.mark.parametrize("chunk", [8, 512])
def test_control_deferred_prompt_that_counts_as_stored_loses_drafts(chunk, monkeypatch):
    admit = deferred_kv.DeferredKV.admit

    def admit_as_stored(self, sequence):
        admit(self, sequence)
        self._first_missing[sequence.slot] = -1
        self._incomplete.difference_update(sequence.pages)

    monkeypatch.setattr(deferred_kv.DeferredKV, "admit", admit_as_stored)
    monkeypatch.setattr(deferred_kv.DeferredKV, "release", lambda self, slot, length: None)
    cached, num_drafts, num_accepted = turns(chunk, overlap=False)
    assert cached >= 48 and num_accepted < num_drafts


def test_pages_of_a_request_that_is_aborted_within_its_prompt_still_lack_kv():
    """Let a request share pages without KV and end before its drafts; a later one shares them too."""
    model = {"method": "draft_model", "model": heads.target_copy("llama", "float32"), "adaptive": False}
    engine = Setup().engine({**model, "num_speculative_tokens": 3}, page_size=8, max_num_batched_tokens=8)
    off = SamplingParams(max_tokens=30, ignore_eos=True, speculative={"enabled": False})
    ids = heads.tiny.prompt(0, 18)
    ids = [*ids, *run(engine, [request(0, off, prompt_token_ids=ids)])["0"].token_ids, 9, 9]
    engine.add(request(1, replace(off, speculative=None), prompt_token_ids=[*ids, *heads.tiny.prompt(3, 60)]))
    engine.step()
    engine.abort("1")
    params = SamplingParams(max_tokens=18, ignore_eos=True)
    before = engine.stats().num_cached_tokens
    steps = run(engine, [request(2, params, prompt_token_ids=ids)])["2"].steps
    assert engine.stats().num_cached_tokens - before >= 40
    assert sum(step.num_accepted for step in steps) == sum(step.num_draft for step in steps) > 0


def test_pages_of_a_request_in_a_failed_step_lack_kv():
    model = {"method": "draft_model", "model": heads.target_copy("llama", "float32")}
    engine = Setup().engine(model, page_size=8)
    engine.add(request(0, SamplingParams(max_tokens=30, ignore_eos=True), prompt_token_ids=[3] * 20))
    for _ in range(3):
        engine.step()
    kv, (sequence,) = engine.loop.device.deferred_kv, engine.loop.scheduler.running
    pages = set(sequence.pages)
    kv.invalidate(sequence.slot)
    engine.abort("0")
    assert pages <= kv._incomplete


@pytest.mark.parametrize("chunk", [8, 512])
def test_control_forgotten_pages_lose_drafts(chunk, monkeypatch):
    monkeypatch.setattr(deferred_kv.DeferredKV, "release", lambda self, slot, length: None)
    cached, num_drafts, num_accepted = turns(chunk, overlap=False, stores_prompts=True)
    assert cached >= 48 and num_accepted < num_drafts


@pytest.mark.parametrize("method", ["draft_model", "hybrid"])
@pytest.mark.parametrize("caching", [False, True])
def test_steps_without_drafts_do_not_run_the_model(method, caching, monkeypatch):
    """Count passes of the draft model for a request without speculation; hybrids search beside it."""
    model = {"method": "draft_model", "model": heads.target_copy("llama", "float32")}
    spec = model if method == "draft_model" else {"method": method, "proposers": [model, {"method": "ngram"}]}
    engine = Setup().engine(spec, page_size=8, enable_prefix_caching=caching)
    proposer = engine.loop.device.drafting.proposer
    runner = (proposer.members[0] if method == "hybrid" else proposer).runner
    forward, sizes = runner.forward, []

    def counted(rows):
        sizes.append(len(rows.tokens))
        return forward(rows)

    monkeypatch.setattr(runner, "forward", counted)
    params = SamplingParams(max_tokens=20, ignore_eos=True, speculative={"enabled": False})
    run(engine, [request(0, params, prompt_token_ids=heads.tiny.prompt(0, 12))])
    assert not sizes
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for number in (1, 2):
        with without_drafts():
            run(engine, [request(number, params, prompt_token_ids=heads.tiny.prompt(number, 12))])
        assert sizes == [13] * number  # the prompt alone
