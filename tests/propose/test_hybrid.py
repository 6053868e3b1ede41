"""Hybrid proposer: which member is selected, extended and named."""

from dataclasses import replace

import pytest
import torch

import heads
import proposers
import tiny
from draftproof.errors import ConfigError
from draftproof.ops.contract.draft_search import FIXED_ONE
from draftproof.propose.hybrid import HybridProposer
from draftproof.propose.suffix import SuffixProposer
from draftproof.sampling_params import SamplingParams
from draftproof.types import DeviceBatch, Draft, DraftSpec
from exact import Batch, Case, Setup, plant, reference_run
from proposer_cases import lines, make

PERFECT, JUNK = {"method": "proposers:DevicePerfect"}, {"method": "proposers:DeviceJunk"}
SUFFIX, NGRAM = {"method": "suffix"}, {"method": "ngram"}


def hybrid(*members, **more):
    return {"method": "hybrid", "proposers": list(members), "adaptive": False, **more}


def served(spec, temperature=0.7, overlap=False, **fields):
    """Serve long outputs with these drafts, check that they are exact, and return their steps."""
    setup = Setup()
    cases = [Case(i, "sixty tokens", temperature, length=12 + i, prompt=False, **fields) for i in range(3)]
    batch = Batch(cases, setup, spec, overlap=overlap)
    assert batch.differences() == []
    records = batch.serve({str(a.index): reference_run(a, setup).token_ids for a in cases})
    return [step for record in records.values() for step in record.steps]


@pytest.fixture(autouse=True)
def long_answers(monkeypatch):
    monkeypatch.setitem(__import__("exact").OPTIONS, "sixty tokens", {"max_tokens": 60, "ignore_eos": True})


def accepted(steps, name):
    return sum(step.sources.count(name) for step in steps)


# --- selection ---


@pytest.mark.parametrize("members", [(PERFECT, JUNK), (JUNK, PERFECT)], ids=["first", "last"])
@pytest.mark.parametrize("overlap", [False, True])
def test_better_member_is_soon_selected(members, overlap):
    spec = hybrid(*members, num_speculative_tokens=4)
    alone = served({**PERFECT, "adaptive": False, "num_speculative_tokens": 4})
    steps = served(spec, overlap=overlap)
    assert accepted(steps, "perfect") > 60
    assert len(steps) < 1.6 * len(alone)


def test_control_wrong_scores_select_the_worse_member(monkeypatch):
    def wrong_scores(whole, ops, batch, record, offers, search):
        wrong = [replace(offer, expected_tokens=m + 0 * offer.count) for m, offer in enumerate(offers)]
        return whole(ops, batch, record, wrong, search)

    plant(monkeypatch, "select_drafts", wrong_scores)
    steps = served(hybrid(PERFECT, JUNK, num_speculative_tokens=4))
    assert accepted(steps, "perfect") < 60


def test_search_scores_its_own_matches():
    proposer = make(HybridProposer, proposers=[NGRAM, {**SUFFIX, "pool_tokens": 0}], k=6)
    long = [*range(20, 34), 50, *range(20, 34)]
    columns = lines(proposer.env.ops, 6, [long, [5, 6, 7, 8]])
    draft = proposer.draft(DeviceBatch(columns, torch.tensor([0, 1]), torch.tensor([6, 6])))
    assert draft.count.tolist() == [6, 0] and draft.tokens[0].tolist() == [50, 20, 21, 22, 23, 24]
    assert draft.sources.dtype == torch.int8


@pytest.mark.parametrize("seed", [1, 2])
def test_new_request_in_a_slot_resets_the_record(seed):
    """Clients may send one seed always."""
    proposer = make(HybridProposer, proposers=[NGRAM, SUFFIX], k=4)
    columns = lines(proposer.env.ops, 4, [[5, 6, 7, 5, 6], [7]])
    batch = DeviceBatch(columns, torch.tensor([0]), torch.tensor([4]))
    columns.seed[0] = 1
    proposer.draft(batch)
    assert not proposer.record.rejected.any()
    columns.length[0] += 1  # all were rejected
    columns.tokens[0, 5] = 90
    proposer.draft(batch)
    assert proposer.record.rejected[0].sum() == FIXED_ONE
    columns.seed[0] = seed
    proposer.start(0, tiny.request(0, SamplingParams(), seed=seed))
    proposer.draft(batch)
    assert not proposer.record.rejected.any()


# --- extension ---


def test_match_extends_the_drafts_of_another_member():

    class Two(proposers.DevicePerfect):
        def draft(self, batch):
            return Draft(torch.tensor([[21, 22, 0, 0, 0, 0]]), torch.tensor([2]))

    proposer = make(HybridProposer, proposers=[PERFECT, {**SUFFIX, "min_match": 2}], k=6)
    proposer.members[0] = Two(proposer.env, {})
    columns = lines(proposer.env.ops, 6, [[20, 21, 22, 23, 24, 25, 26, 40, 41], [7]])
    draft = proposer.draft(DeviceBatch(columns, torch.tensor([0]), torch.tensor([6])))
    assert draft.tokens[0].tolist() == [21, 22, 23, 24, 25, 26] and draft.count.tolist() == [6]
    names = [proposer.sources[i] for i in draft.sources[0].tolist()]
    assert names == ["perfect"] * 2 + ["suffix"] * 4
    draft = proposer.draft(DeviceBatch(columns, torch.tensor([0]), torch.tensor([3])))
    assert draft.count.tolist() == [3]


@pytest.mark.parametrize("short", ["never", "limit", "rounds", "chains", "another"])
def test_no_search_behind_drafts_that_fill_the_budget(short, monkeypatch):
    """A second search is a wasted launch, unless the model may have made fewer drafts."""
    calls = []

    class Model(proposers.DevicePerfect):
        stops_early = short == "chains"

        def draft(self, batch):
            return Draft(torch.tensor([[11, 12, 13, 14]]), batch.budget.clone())

    def extend(whole):
        return lambda self, batch, begun: calls.append(begun is None) or whole(self, batch, begun)

    monkeypatch.setattr(SuffixProposer, "extend", extend(SuffixProposer.extend))
    limit = {"num_speculative_tokens": 2} if short == "limit" else {}
    members = [{**PERFECT, **limit}, SUFFIX, *([NGRAM] if short == "another" else [])]
    proposer = make(HybridProposer, proposers=members, k=4)
    proposer.members[0], proposer.model_source = Model(proposer.env, {}), 0
    columns = lines(proposer.env.ops, 4, [[*range(20, 40)], [7]])
    batch = DeviceBatch(columns, torch.tensor([0]), torch.tensor([4]))
    drafts = proposer.draft(replace(batch, spec=DraftSpec(2 if short == "rounds" else 4)))
    assert calls == [True] + [False] * (short != "never")
    assert drafts.count.item() == {"limit": 2, "rounds": 2}.get(short, 4)


def test_second_run_is_drafted_from_the_pool():
    """The head is random, so accepted drafts come from the pool."""
    members = [{"method": "mtp", **heads.options("mtp", "llama", "float32")}, SUFFIX]
    spec = hybrid(*members, num_speculative_tokens=5)
    steps = served(spec)  # `served` runs each request twice
    assert accepted(steps, "suffix") > 90 and len(steps) < 60


def test_member_has_its_own_number_of_drafts():
    head = {"method": "mtp", **heads.options("mtp", "llama", "float32"), "num_speculative_tokens": 2}
    steps = served(hybrid(head, {**NGRAM, "prompt_lookup_min": 60}, num_speculative_tokens=6))
    assert {step.num_draft for step in steps} <= {0, 1, 2}


def drafts_made(*order, count=2, chains=True):
    """Return tokens and sources of the drafts of each step; without `chains` the head does not stop early."""
    members = {"head": {"method": "mtp", **heads.options("mtp", "llama", "float32")}, "suffix": SUFFIX}
    spec = hybrid(*(members[name] for name in order), num_speculative_tokens=4)
    params = SamplingParams(max_tokens=50, ignore_eos=True, include_draft_logprobs=True, temperature=0.3)
    engine = tiny.engine(speculative=spec)
    for member in engine.loop.proposer.members:
        member.stops_early &= chains
    records = tiny.run(engine, [tiny.request(i, params) for i in range(count)])
    steps = [step for record in records.values() for step in record.steps]
    return [[(draft.token_id, draft.source) for draft in step.drafts or []] for step in steps]


@pytest.mark.parametrize("order", [("head", "suffix"), ("suffix", "head")], ids=" ".join)
def test_model_drafts_that_cannot_win_are_skipped(order, monkeypatch):
    made, num_skipped, whole = drafts_made(*order), [], HybridProposer._selected_budget

    def full_budget(hybrid, batch, found):
        num_skipped.append(int((whole(hybrid, batch, found) < batch.budget).sum()))
        return batch.budget

    with monkeypatch.context() as patch:
        patch.setattr(HybridProposer, "_selected_budget", full_budget)
        assert drafts_made(*order) == made and sum(num_skipped) > 20
    assert {source for step in made for _, source in step} == {"mtp", "suffix"}
    monkeypatch.setattr(HybridProposer, "_selected_budget", lambda hybrid, batch, found: 0 * batch.budget)
    assert drafts_made(*order) != made  # negative control: the winner is skipped


def test_draft_records_name_every_source():
    steps = served(hybrid(PERFECT, SUFFIX, num_speculative_tokens=4))
    assert accepted(steps, "perfect") and accepted(steps, "suffix")
    case = tiny.request(0, SamplingParams(max_tokens=30, ignore_eos=True, include_draft_logprobs=True))
    head = {"method": "mtp", **heads.options("mtp", "llama", "float32"), "num_speculative_tokens": 2}
    target = tiny.engine(speculative=hybrid(head, SUFFIX, num_speculative_tokens=5))
    record = tiny.run(target, [case])["0"]
    drafts = [draft for step in record.steps for draft in step.drafts or []]
    assert {draft.source for draft in drafts} == {"mtp", "suffix"}
    for draft in drafts:
        assert (draft.draft_logprob is None) == (draft.draft_rank is None) == (draft.source == "suffix")


def test_draft_probs_are_those_of_the_selected_member():
    proposer = make(HybridProposer, proposers=[NGRAM, SUFFIX], k=2)
    probs_of_first = torch.rand((2, 2, tiny.VOCAB))
    mine = Draft(torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2]), probs=probs_of_first)
    theirs = Draft(torch.tensor([[5, 6], [7, 8]]), torch.tensor([2, 2]))
    chosen = Draft(
        torch.tensor([[1, 2], [7, 8]]), torch.tensor([2, 2]), sources=torch.tensor([[0, 1], [1, 1]])
    )
    probs = proposer._attach_draft_info(chosen, [mine, theirs], torch.tensor([1, 2])).probs
    assert torch.equal(probs[0, 0], probs_of_first[0, 0])
    certain = torch.nn.functional.one_hot(torch.tensor([2, 7, 8]), tiny.VOCAB).float()
    assert torch.equal(torch.stack([probs[0, 1], probs[1, 0], probs[1, 1]]), certain)


# --- capabilities and options ---


def test_capabilities_are_those_of_the_members():
    both = make(HybridProposer, proposers=[NGRAM, SUFFIX])
    assert both.sources == ("ngram", "suffix") and both.is_free and both.learns and not both.runs_behind_steps
    assert HybridProposer.storage({"proposers": [NGRAM, SUFFIX]}, None, None) == SuffixProposer.storage(
        {}, None, None
    )


def test_options_are_checked():
    for wrong, reason in (
        (None, "two to 4"),
        ("ngram", "two to 4"),
        ([NGRAM], "two to 4"),
        ([NGRAM, "suffix"], "a mapping with a 'method'"),
        ([NGRAM, {"method": "sufix"}], "suffix"),
        ([NGRAM, {"method": "given"}], "beside any proposers"),
        ([NGRAM, hybrid(NGRAM, NGRAM)], "on the device"),
        ([NGRAM, {**SUFFIX, "min_mach": 3}], "min_match"),
        ([NGRAM, {**SUFFIX, "num_speculative_tokens": 0}], "1..64"),
    ):
        with pytest.raises(ConfigError, match=reason):
            make(HybridProposer, proposers=wrong)
    head = {"method": "mtp", **heads.options("mtp", "llama", "float32")}
    with pytest.raises(ConfigError, match="not several"):
        tiny.engine(speculative=hybrid(head, head))
