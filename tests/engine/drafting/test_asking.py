"""Asking a hybrid's model only where that is worth its price: output and storage stay the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import heads
import tiny
from audited_head import Audited
from draftproof.engine.drafting.budget import DraftBudgets
from draftproof.engine.drafting.draft_gate import HOPE, Asking
from draftproof.engine.drafting.draft_gate_kernels import FORGETS
from draftproof.engine.drafting.step_cost import RowCosts
from draftproof.ops.contract.draft_search import FIXED_ONE
from draftproof.propose.hybrid import HybridProposer
from draftproof.sampling_params import SamplingParams
from draftproof.types import DeviceBatch, Draft
from exact import Ask, Company, Where
from proposer_cases import lines, make
from proposers import DevicePerfect

HEAD = {"method": "mtp", **heads.options("mtp", "llama", "float32")}
SUFFIX = {"method": "suffix", "pool_tokens": 0}

# --- the promise, and what the head has stored --------------------------------------------------------


def now_and_then(how: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Serve with an audited head beside a search. The rounds that it was asked for."""
    turns, rounds, most = cycle([0.0, 0.2, 1e9, 1e-9]), set(), cycle([4, 1, 3, 2, 2])

    def weigh(self: Asking, planned: Any, budget: Any, late: float) -> None:
        turn = next(turns)
        rounds.add(self.drafting.rounds)
        self.drafting.asks, self.drafting.price = (True, turn) if how == "price" else (turn < 1, 0.0)
        self.drafting.most = next(most) if how == "rounds" else 4

    monkeypatch.setattr(Asking, "weigh", weigh)
    head = {"method": "test_heads:AuditedEagle3", "model": heads.head("eagle3", "llama", "float32")}
    head |= {"weights": "llama/float32", "cached": False}
    spec = {"method": "hybrid", "proposers": [head, SUFFIX], "num_speculative_tokens": 4}
    asks = [Ask(i, "none", 0.7, length=14 + 9 * i, prompt=False) for i in range(3)]
    sizes = {"page_size": 8, "enable_prefix_caching": False}
    company = Company(asks, Where(), spec, arrivals=[0, 0, 2], overlap=overlap, sizes=sizes)
    assert company.differences() == []
    return rounds


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["price", "asks", "rounds"])
def test_a_model_that_is_asked_now_and_then_keeps_up(
    how: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By price, as where the device is waited for; or not at all or for some rounds, as where steps are
    queued ahead."""
    before = Audited.rows_checked
    assert {0, 4, 1 if how == "rounds" else 0} <= now_and_then(how, overlap, monkeypatch)
    assert Audited.rows_checked > before + 100


def test_control_one_that_does_not_keep_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = HybridProposer._ask

    def idle(self: HybridProposer, index: int, batch: DeviceBatch) -> Any:
        if index != self.weighed or (batch.spec and batch.spec.rounds):
            return ask(self, index, batch)
        count = torch.zeros_like(batch.budget)
        return Draft(torch.zeros((len(count), self.env.k), dtype=torch.int64), count), count - 1

    monkeypatch.setattr(HybridProposer, "_ask", idle)
    with pytest.raises(AssertionError, match="KV differs"):
        now_and_then("price", False, monkeypatch)


# --- round by round -----------------------------------------------------------------------------------


class Model(DevicePerfect):
    """Stands in for one: it says how many drafts it was asked for, if they can be the better ones."""

    def draft(self, batch: DeviceBatch) -> Draft:
        self.wanted = int(batch.budget.max())
        return Draft(torch.tensor([[11, 12, 13, 14]]), batch.budget.clone())


@pytest.fixture
def both() -> HybridProposer:
    proposer = make(HybridProposer, proposers=[{"method": "proposers:DevicePerfect"}, SUFFIX])
    proposer.members[0] = Model(proposer.env, {})
    proposer.weighed = 0
    return proposer


COPY, NEWS = [*range(20, 34), 50, *range(20, 34)], [*range(20, 40)]


def asked(
    proposer: HybridProposer, text: list[int], price: float, budget: int = 4, fell: int = 0, seed: int = 5
) -> int:
    """Rounds for a request of which it is known that so many windows fell; by that seed."""
    columns = lines(proposer.env.ops, 4, [text, [7]])
    columns.seed[0] = 5
    proposer.record.last[0], proposer.record.rejected[0, 0] = seed, fell * FIXED_ONE
    proposer.record.last[2] = proposer.record.accepted[0] = 0
    proposer.draft(DeviceBatch(columns, torch.tensor([0]), torch.tensor([budget]), price=price))
    beaten = text is COPY and fell == 0
    wanted = 0 if beaten else proposer.asked_rounds
    assert proposer.members[0].wanted == wanted  # type: ignore[attr-defined]
    return proposer.asked_rounds


def test_a_long_match_saves_asking(both: HybridProposer) -> None:
    assert asked(both, COPY, 0.2) == 0 and asked(both, NEWS, 0.2) > 0
    assert asked(both, COPY, 0.0) == 4  # nobody knows the price


def test_as_many_rounds_as_are_worth_it(both: HybridProposer) -> None:
    """Of a newcomer two drafts in three are hoped to stand: 0.67, 0.44, 0.30, 0.20."""
    found = [asked(both, NEWS, price) for price in (0.1, 0.25, 0.4, 0.6, 0.7)]
    assert found == [4, 3, 2, 1, 0]
    assert asked(both, NEWS, 0.1, budget=2) == 2


def test_what_fell_is_remembered(both: HybridProposer) -> None:
    assert asked(both, NEWS, 0.25) == 3
    assert asked(both, NEWS, 0.25, fell=2) == 1
    assert asked(both, NEWS, 0.25, fell=2, seed=6) == 3  # that was another request


class Short(Model):
    """It looks at its drafts, and makes one."""

    ends_chains = True

    def draft(self, batch: DeviceBatch) -> Draft:
        made = super().draft(batch)
        return Draft(made.tokens, made.count.clamp(max=1))


MATCH = [21, 22, 50, 51, 52, 53, 21, 22]


@pytest.mark.parametrize("kind", [Model, Short])
def test_how_many_drafts_there_are_does_not_decide_whose_are_taken(
    both: HybridProposer, kind: type[Model]
) -> None:
    """Four are worth more than those of the search, one is not; but how many there are says what they are,
    and then others' drafts would be judged with noise that was chosen."""
    both.members[0] = kind(both.env, {})
    columns = lines(both.env.ops, 4, [MATCH, [7]])
    columns.seed[0], both.record.last[0] = 5, 5
    both.record.last[2] = both.record.accepted[0] = both.record.rejected[0] = 0
    batch = DeviceBatch(columns, torch.tensor([0]), torch.tensor([4]))
    _, _, worth = both.members[1].extend(batch, None)
    assert 0.67 < worth.item() / FIXED_ONE < 1.6
    draft = both.draft(replace(batch, price=1e-9))
    assert draft.tokens[0, 0] == 11 and draft.sources is not None and draft.sources[0, 0] == 0


def test_nobody_is_asked_for_nobody(both: HybridProposer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking looked worth it, but whoever was to have drafts has better ones."""
    monkeypatch.setattr(HybridProposer, "_worth", lambda *given: 4)
    assert asked(both, COPY, 0.2) == 0 and asked(both, NEWS, 0.2) == 4


# --- before the step ----------------------------------------------------------------------------------


class Steps:
    """Two requests whose steps are queued ahead."""

    def __init__(self, asking: float = 0.2) -> None:
        ops = SimpleNamespace(asynchronous=True)
        self.drafting: Any = SimpleNamespace(
            slots=SimpleNamespace(requests=[None] * 3, ops=ops), asks=True, price=0.0, rounds=4, took=0.0,
            k=4, most=4, fewer=lambda count, wanted, prompts: 4 - wanted,
        )  # fmt: skip
        costs = RowCosts({1: 1.0, 16: 1.0}, asking={1: asking, 3: asking})
        scheduler: Any = SimpleNamespace(
            budgets=SimpleNamespace(costs=costs, limit=np.full(3, 4)),
            host=SimpleNamespace(length=np.zeros(3, np.int64)),
        )
        self.asking = Asking(scheduler, self.drafting, model=0)
        self.asking.priced, self.costs = True, costs
        self.sequences = [SimpleNamespace(slot=i, adaptive=True) for i in range(2)]
        self.asked, self.takes = 0, asking

    def step(
        self,
        accepted: tuple[int, int],
        source: int,
        drafts: int = 4,
        newcomers: tuple = (),
        late: float = 0.0,
    ) -> bool:
        """What is decided after windows of these."""
        planned: Any = SimpleNamespace(
            slots=np.arange(2), admitted=newcomers, sequences=self.sequences, num_rows=10, has_prompts=False,
            drafts=np.full(2, 4),
            nothing=np.zeros(2, np.int64),
        )  # fmt: skip
        table = np.zeros((2, 8), np.int64)
        table[:, 0], table[:, 1], table[:, 2] = 1 + np.array(accepted), drafts, accepted
        sources = np.full((2, 4), source, np.int8)
        # a step is read when the drafts behind it are made
        self.costs.observe(10, 100, 1.0 + self.takes * (self.asked > 0), self.asked)
        self.asking.hear(planned, table, sources, np.ones(2, np.bool_), self.asked)
        self.asking.weigh(planned, np.full(2, 4), late)
        self.asked = 2 if self.drafting.asks else 0
        assert self.drafting.price == 0.0  # a captured step knows of none
        return bool(self.drafting.asks)


def test_nobody_is_asked_while_a_search_stands() -> None:
    steps = Steps()
    assert steps.step((2, 1), source=0)
    assert not steps.step((4, 4), source=1)  # both copy
    assert steps.step((3, 1), source=1)  # and no longer
    assert steps.step((2, 2), source=1, drafts=2)  # all it had, but that was little


def test_a_model_that_brings_nothing_is_asked_again_later() -> None:
    steps = Steps()
    for _ in range(40):
        told = steps.step((0, 0), source=0)
        if not told:
            break
    assert not told
    waited = next(i for i in range(400) if steps.step((0, 0), source=1))
    assert waited < HOPE / (HOPE - 1) / FORGETS


@pytest.mark.parametrize("late", [0.0, 0.4, 1.0])
def test_it_costs_less_where_the_host_is_late(late: float) -> None:
    """Windows that are not worth the price are worth six tenths of it. Half of it is always asked."""
    for asking, worth in ((1.2, late > 0), (12.0, False)):
        steps = Steps(asking=asking)
        for _ in range(200):
            its = bool(steps.drafting.asks)
            steps.step((1, 1) if its else (0, 0), 0 if its else 1, late=late)
        assert sum(steps.step((1, 1), 0, late=late) for _ in range(8)) == (8 if worth else 0)


def test_newcomers_are_hoped_for() -> None:
    steps = Steps()
    while steps.step((0, 0), source=0):
        pass
    assert steps.step((0, 0), source=1, newcomers=tuple(steps.sequences))


def windows_asked(steps: Steps, accepted: tuple[int, int], count: int, newcomers: tuple = ()) -> int:
    """Of so many windows that the model's drafts are in where it was asked, and a search's that fall."""
    found = 0
    for i in range(count):
        its = bool(steps.drafting.asks)
        came = newcomers if i == 0 else ()
        found += steps.step(accepted if its else (0, 0), 0 if its else 1, newcomers=came)
    return found


@pytest.mark.parametrize("dear", [1.0, 4.0])
def test_a_hope_is_told_in_prices(dear: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking takes as long as several steps, in which more tokens are made than were ever hoped for in
    tokens: a newcomer is asked for all the same. Control: nothing is hoped for."""
    for hope, some in ((HOPE, True), (0.0, False)):
        monkeypatch.setattr("draftproof.engine.drafting.draft_gate.HOPE", hope)
        steps = Steps(asking=dear)
        windows_asked(steps, (0, 0), 60)
        assert not steps.drafting.asks
        for _ in range(30):  # a copy: tokens come quickly
            steps.step((4, 4), source=1)
        assert steps.asking.price(dear, 2) > 2 * dear
        steps.step((3, 4), source=1)
        assert (windows_asked(steps, (4, 4), 9, tuple(steps.sequences)) > 0) is some


@pytest.mark.parametrize("learns", [True, False])
def test_a_newcomer_is_thought_to_be_as_those_before(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model has brought everybody much, windows in which it does not are borne for a while; where
    it has brought nobody anything, few are enough. Control: nothing is learned of others."""
    if not learns:
        monkeypatch.setattr("draftproof.engine.drafting.draft_gate.USUAL", 0.0)
    found = []
    for usual in ((4, 4), (0, 0)):
        steps = Steps(asking=0.5)
        for _ in range(20):
            windows_asked(steps, usual, 20, tuple(steps.sequences))
        for _ in range(40):  # the same price for both
            windows_asked(steps, (0, 0), 1)
        found.append(windows_asked(steps, (0, 0), 30, tuple(steps.sequences)))
    assert found[1] and (found[0] > found[1] + 4) is learns


def test_one_that_is_left_does_not_pay_for_those_that_have_gone() -> None:
    """Two were brought 0.85 tokens each for a price of 1.14; it is half of that when one of them is left."""
    steps = Steps(asking=0.4)
    for _ in range(80):
        assert steps.step((1, 1), source=0)
    left: Any = SimpleNamespace(
        slots=np.arange(1), admitted=(), sequences=steps.sequences[:1], num_rows=5, has_prompts=False
    )
    steps.asking.weigh(left, np.full(1, 4))
    assert steps.drafting.asks and steps.asking.price(0.4, 2) > 1.0


@pytest.mark.parametrize("apart", [True, False])
def test_drafts_of_a_search_do_not_cost_what_asking_costs(apart: bool) -> None:
    """Half of the drafts stand and rows are cheap, but asking takes as long as three steps. In a hybrid it is
    weighed here whether that is paid; to a head alone (the control) no drafts are given then."""
    made = DraftBudgets(1, RowCosts({1: 1.0, 8: 1.1}, learns=False, asking={1: 3.0}))
    made.asked_apart = apart
    made.start(0, 4, adaptive=True)
    slots, given = np.arange(1), []
    for _ in range(60):
        given.append(int(made.take(slots, np.array([4]), keys=0)[0]))
        made.pay(slots, np.array(given[-1:]), given[-1])
        made.record(slots, np.array(given[-1:]), np.array([min(given[-1], len(given) % 2)]))
    assert bool(np.mean(given[20:]) > 2) is apart


def test_without_a_price_or_with_a_fixed_number_it_is_asked() -> None:
    steps = Steps()
    steps.sequences[1].adaptive = False
    assert steps.step((4, 4), source=1) and steps.step((4, 4), source=1)
    steps = Steps()
    steps.asking.priced = False
    assert steps.step((4, 4), source=1) and steps.step((4, 4), source=1)


# --- in an engine -------------------------------------------------------------------------------------


def engine_of(**spec: Any) -> Any:
    speculative = {"method": "hybrid", "proposers": [HEAD, SUFFIX], "num_speculative_tokens": 4, **spec}
    return tiny.engine(speculative=speculative, warm_up=True, max_num_seqs=2)


def test_prices_are_learned_from_the_clock() -> None:
    engine = engine_of()
    asking = engine.loop.asking
    assert (
        engine.loop.scheduler.drafts_before_plan
        and asking.priced
        and engine.loop.scheduler.budgets.asked_apart
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7)
    tiny.run(engine, [tiny.request(i, params) for i in range(2)])
    assert asking._round > 0 and asking._spent > 0 and asking.price(asking._round, 1) > 0
    other = engine_of(adaptive=False).loop  # a request may adapt all the same: somebody has to count it
    assert not other.asking.priced and not other.scheduler.budgets.asked_apart


@pytest.mark.parametrize("alone", [False, True])
def test_steps_that_overlap_where_the_device_is_waited_for(alone: bool) -> None:
    """The drafts that were clocked last are then not those behind the step that is heard of."""
    method = HEAD if alone else {"method": "hybrid", "proposers": [HEAD, SUFFIX]}
    speculative = {**method, "num_speculative_tokens": 4}
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7)
    found = []
    for options in ({"speculative": speculative, "warm_up": True, "overlap": True}, {}):
        engine = tiny.engine(max_num_seqs=2, **options)
        ran = tiny.run(engine, [tiny.request(i, params) for i in range(4)], arrivals=[0, 0, 3, 9])
        found.append({name: record.same() for name, record in ran.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("strategy", ["rejection", "target_match"])
def test_no_drawn_draft_is_left_out_under_rejection(strategy: str) -> None:
    """A chain may have ended because of what was drawn, and how many are verified depends on its length. With
    drafts left out so, `rejection` would have another law; here further rows are far too dear."""
    engine = engine_of(verify_strategy=strategy)
    dear = {1: 1.0, 2: 90.0, 16: 1000.0}
    engine.loop.scheduler.budgets.costs = RowCosts(dear, between=True, learns=False)
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7)
    record = tiny.run(engine, [tiny.request(1, params)])["1"]
    verified = [step.num_draft for step in record.steps[1:-1]]
    if strategy == "rejection":
        assert min(verified) > 0
    else:
        assert verified.count(0) > len(verified) / 2


def test_what_was_timed_of_a_round_and_what_a_step_had_of_them_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "draftproof.engine.step.warmup.WarmUp.draft_seconds",
        lambda self, sizes: {1: (4.0, 0.5), 2: (5.0, 0.75)},
    )
    monkeypatch.setattr("draftproof.engine.engine.Engine._asks_for_all", lambda *_: False)
    engine = engine_of()
    costs, drafting = engine.loop.scheduler.budgets.costs, engine.loop.device.drafting
    assert (costs.asking(2), costs.asking(2, 2), costs.round(1), costs.round(2)) == (5.0, 3.5, 0.5, 0.75)
    monkeypatch.setattr(drafting, "asked_for", lambda planned, budget: (len(planned.slots), 2))
    told, heard = [], []
    monkeypatch.setattr(costs, "observe", lambda *given: told.append(given[3:]))
    hear = engine.loop.asking.hear
    monkeypatch.setattr(engine.loop.asking, "hear", lambda *given: heard.append(given[2:]) or hear(*given))
    tiny.run(engine, [tiny.request(0, SamplingParams(max_tokens=12, ignore_eos=True))])
    assert {fewer for _, fewer in told} == {2}
    assert {given[2:] for given in heard} == {(1, 2, True)}


@pytest.mark.parametrize(
    "method", [HEAD, {"method": "hybrid", "proposers": [HEAD, SUFFIX]}], ids=["head", "both"]
)
def test_every_draft_has_a_source(method: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`heard` looks at all of them, and does not look whether they are there."""
    engine = tiny.engine(speculative={**method, "num_speculative_tokens": 4}, max_num_seqs=2)
    hear, shapes = engine.loop.asking.hear, set()
    engine.loop.asking.hear = lambda *given: shapes.add(given[2].shape[1]) or hear(*given)
    tiny.run(engine, [tiny.request(0, SamplingParams(max_tokens=12, ignore_eos=True))])
    assert shapes == {4}


@pytest.mark.parametrize("overlap", [False, True])
def test_no_draft_is_left_out_because_of_how_many_there_are(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are counted, their number may say what was drawn; beside a prompt all are verified. Where
    steps are queued ahead only so many are known as there may be."""
    speculative = {**HEAD, "num_speculative_tokens": 4, "verify_strategy": "rejection", "adaptive": False}
    engine, cut = tiny.engine(speculative=speculative, max_num_seqs=3, overlap=overlap), []
    fit = DraftBudgets.fit
    monkeypatch.setattr(DraftBudgets, "fit", lambda *given: cut.append(given[2]) or fit(*given))
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9)
    tiny.run(engine, [tiny.request(i, params) for i in range(5)], arrivals=[0, 2, 4, 6, 8])
    assert bool(cut) is overlap


def test_what_asking_costs_is_learned_from_steps_of_both_kinds() -> None:
    """Timed at start it looks cheap; steps say otherwise, and then that it is cheap after all."""
    steps = Steps(asking=0.05)
    # the model brings a little; or a search has all of it, and nobody is asked
    windows = ((1, 1), 0), ((4, 4), 1)
    steps.takes = 1.5
    for turn in range(80):
        accepted, source = windows[turn // 2 % 2]
        steps.step(accepted, source)
    assert not any(steps.step((1, 1), source=0) for _ in range(5))
    steps.takes = 0.05
    for turn in range(600):
        accepted, source = windows[turn // 2 % 2]
        steps.step(accepted, source, newcomers=tuple(steps.sequences) if turn % 8 == 0 else ())
    assert steps.step((1, 1), source=0, newcomers=tuple(steps.sequences))
    assert all(steps.step((1, 1), source=0) for _ in range(5))


def test_a_step_is_read_when_the_drafts_behind_it_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the time until then has in it what asking for these took, as `Loop` tells the prices."""
    engine, seen = engine_of(), []
    drafting, ops = engine.loop.device.drafting, engine.loop.device.ops
    draft, fetch = drafting.draft, ops.runtime.fetch

    def drafts(*given: Any) -> None:
        seen.append("drafts")
        draft(*given)

    def reads(tensor: Any) -> Any:
        seen.append("read")
        return fetch(tensor)

    monkeypatch.setattr(drafting, "draft", drafts)
    monkeypatch.setattr(ops.runtime, "fetch", reads)
    monkeypatch.setattr(engine.loop, "_count_drafts", lambda: None)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7)
    tiny.run(engine, [tiny.request(0, params)])
    steps = "".join("d" if one == "drafts" else "r" for one in seen)
    assert steps.startswith("drdr") and "rd" * steps.count("d") not in steps
