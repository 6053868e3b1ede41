"""suffix: what it drafts, what its pool holds, for whom and for how long; and that none of it is heard."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest
import torch

import tiny
from draftproof.errors import ConfigError
from draftproof.ops import resolve
from draftproof.ops.contract.draft_search import HASHED_NGRAM_SIZES, MAX_MATCH_TOKENS, SuffixOptions
from draftproof.propose import suffix_pool as pools
from draftproof.propose.suffix import SuffixProposer
from draftproof.propose.suffix_pool import BODY_TOKENS, LINE_TOKENS, NO_OWNER, Pool, index_lines, owner_of
from draftproof.sampling_params import SamplingParams
from draftproof.types import DeviceBatch
from exact import Batch, Case, Setup, reference_run
from overlap_watch import Watch
from proposer_cases import lines, make

CPU = torch.device("cpu")
OPS = resolve("auto", CPU)
RULE = SuffixOptions(1, 1.5, 0.15)


class Clock:
    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time


class PoolHarness:
    """A pool and slots that look into it."""

    def __init__(self, num_lines=4, ttl=60.0):
        self.clock = Clock()
        self.pool = Pool(OPS, 2, num_lines * LINE_TOKENS, ttl, self.clock)

    def add(self, ids, salt=None, begin=2):
        self.pool.add(salt, np.array(ids), begin)
        self.pool.send()
        self.pool.send()

    def guess(self, text, salt=None, k=6, rule=RULE, begun=()):
        """Drafts after this text."""
        self.pool.set_owner(1, salt)
        self.pool.send()
        columns = lines(OPS, k, [[7], list(text)], max_len=300)
        had = torch.tensor([len(begun)])
        drafts = torch.zeros((1, k), dtype=torch.int64)
        drafts[0, : len(begun)] = torch.tensor(begun, dtype=torch.int64)
        batch = DeviceBatch(columns, torch.tensor([1]), torch.tensor([k]))
        tokens, count, worth = OPS.search.search_suffix(batch, self.pool.device, rule, (drafts, had))
        assert (int(worth) > 0) == (int(count) > len(begun))
        return tokens[0, : int(count)].tolist()


STORY = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]


# --- what is drafted ---


def test_what_another_has_said_is_drafted():
    told = PoolHarness()
    assert told.guess([50, 51, 14, 15, 16]) == []
    told.add(STORY)
    assert told.guess([50, 51, 14, 15, 16]) == [17, 18, 19, 20, 21, 22]
    assert told.guess([50, 51, 60, 15, 16]) == []  # the pool is found by three tokens at least
    assert told.guess([50, 51, 18, 19, 20, 21]) == [22, 23]  # then it ends


def test_the_beginning_is_found_by_the_end_of_the_prompt():
    told = PoolHarness()
    told.add(STORY, begin=5)
    assert (
        told.guess([13, 14, 15])[:1] == [16] and told.guess([12, 13, 14]) == []
    )  # a prompt is not a response


def test_most_votes_win_and_a_split_is_doubted():
    told = PoolHarness()
    for after in (30, 31, 31, 31):
        told.add([1, 2, after + 10, 5, 6, 7, after, after + 1], begin=2)
    assert told.guess([5, 6, 7])[:1] == [31]
    told = PoolHarness(num_lines=8)
    for after in range(30, 38):
        told.add([1, 2, after + 10, 5, 6, 7, after, after + 1], begin=2)
    assert told.guess([5, 6, 7]) == []  # one in eight
    assert told.guess([38 + 10, 5, 6, 7], rule=SuffixOptions(1, 0.0, 0.01)) != []


def test_a_longer_match_is_followed_further():
    told = PoolHarness()
    told.add(STORY)
    few, many = told.guess([14, 15, 16], rule=SuffixOptions(1, 1.5, 0.4)), told.guess(STORY[:9], rule=RULE)
    assert len(few) == 2 and many == STORY[9:]


def test_the_text_itself_repeats_past_its_end():
    assert PoolHarness().guess([40, 41, 42, 40, 41, 42, 40]) == [41, 42, 40, 41, 42, 40]


def test_drafts_of_another_are_gone_on_with():
    told = PoolHarness()
    told.add(STORY)
    assert told.guess([50, 14, 15], begun=[16, 17], k=5) == [16, 17, 18, 19, 20]
    assert told.guess([50, 14, 15], begun=[60, 61]) == [60, 61]
    assert told.guess([50, 14, 15, 16], begun=[17, 18], k=2) == [17, 18]


def test_a_long_response_takes_several_lines_and_is_found_everywhere():
    told = PoolHarness(num_lines=8)
    text = [int(x) for x in np.random.default_rng(3).permutation(900) + 100]
    told.add(text)
    for at in (
        20,
        BODY_TOKENS - 1,
        BODY_TOKENS,
        BODY_TOKENS + 2,
        BODY_TOKENS + MAX_MATCH_TOKENS,
        2 * BODY_TOKENS + 1,
        880,
    ):
        assert told.guess(text[at - 5 : at], k=4) == text[at : at + 4], at


# --- whose it is ---


def shared(salts):
    told = PoolHarness()
    told.add(STORY, salt=salts[0])
    return told.guess([14, 15, 16], salt=salts[1]) != []


def test_two_salts_share_nothing():
    assert shared(("a", "a")) and shared((None, None)) and shared((None, ""))
    assert not shared(("a", "b")) and not shared((None, "b")) and not shared(("a", None))
    assert shared(("\ud800", "\ud800")) and not shared(("\ud800", "\ud801"))  # any text will do


def test_a_line_that_changed_hands_is_its_new_owners():
    """What pointed to it is left in the table; it must lead nowhere."""
    told = PoolHarness(num_lines=1)
    told.add(STORY, salt="a")
    told.add(STORY, salt="b")
    assert told.guess([14, 15, 16], salt="a") == [] and told.guess([14, 15, 16], salt="b") != []


def test_control_owners_that_are_not_told_apart(monkeypatch):
    monkeypatch.setattr(pools, "owner_of", lambda salt: 5)
    assert shared(("a", "b"))


def served(salts, monkeypatch, **options):
    """The same request twice, one after the other: drafts of the second that stood."""
    spec = {"method": "suffix", "adaptive": False, "num_speculative_tokens": 6, **options}
    params = [SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True, cache_salt=s) for s in salts]
    target = tiny.engine(speculative=spec, overlap=True)
    counts, texts = [], []
    for i, one in enumerate(params):
        request = tiny.request(i, one, prompt_token_ids=tiny.prompt(3, 20), seed=77)
        record = tiny.run(target, [request])[str(i)]
        counts.append(sum(step.num_accepted for step in record.steps))
        texts.append(record.token_ids)
    assert texts[0] == texts[1]
    return counts


def test_an_engine_learns_from_what_it_has_said(monkeypatch):
    first, second = served([None, None], monkeypatch)
    assert second >= 16 > first
    first, second = served(["a", "b"], monkeypatch)
    assert second == first
    first, second = served([None, None], monkeypatch, pool_tokens=0)
    assert second == first


@pytest.mark.parametrize(
    "spec",
    [{"method": "suffix"}, {"method": "hybrid", "proposers": [{"method": "ngram"}, {"method": "suffix"}]}],
)
def test_steps_overlap_all_the_same(spec):
    """Requests come and go, and are learned from, and the host never waits for a step."""
    cases = [Case(i, "none", 0.7, length=9 + i, prompt=False) for i in range(6)]
    engine = Setup().engine(spec, overlap=True, max_num_seqs=3)
    watch = Watch(engine)
    assert Batch(cases, Setup(), engine=engine).differences() == []
    ahead, waited = watch.check()
    assert waited == 0 and ahead >= len(watch.launched) - 4 > 10


def test_one_that_was_aborted_teaches_too():
    target = tiny.engine(speculative={"method": "suffix"}, overlap=True)
    target.add(tiny.request(0, SamplingParams(max_tokens=100, ignore_eos=True)))
    for _ in range(20):
        target.step()
    target.abort("0")
    tiny.run(target, [tiny.request(1, SamplingParams(max_tokens=3))])
    assert (target.loop.proposer.pool.owner != NO_OWNER).sum() >= 1


# --- how much, and how long ---


def held(pool):
    """Bytes of its columns, and entries of what could grow."""
    device = pool.device
    sizes = sum(getattr(device, name).nbytes for name in device.__slots__)
    return sizes, max(len(pool._lines), len(pool._digests)), len(pool._added)


def flood(pool, requests, first=0):
    chance = np.random.default_rng(first)
    for i in range(first, first + requests):
        pool.set_owner(i % 2, f"tenant {i}")
        pool.add(f"tenant {i % 5000}", chance.integers(0, 500, 40), 20)
        if i % 8 == 7:
            pool.send()
            pool.send()


def test_ten_thousand_requests_take_no_more_room_than_hundred():
    pool = Pool(OPS, 2, 64 * LINE_TOKENS, 3600.0)
    flood(pool, 8000)
    before = held(pool)
    assert before[1] == 64 and before[2] == 0
    tracemalloc.start()  # it is slow
    start = tracemalloc.get_traced_memory()[0]
    flood(pool, 2000, first=8000)
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    assert held(pool) == before and grown < 100_000, grown


def crowd(monkeypatch, has_time=lambda i: False):
    """Lines that wait to be taken in and the oldest line's age, while somebody comes in every step."""
    monkeypatch.setattr(OPS.runtime, "asynchronous", True)
    clock, waiting, ages = Clock(), [], []
    pool = Pool(OPS, 2, 64 * LINE_TOKENS, 50.0, clock)
    for i in range(300):
        clock.time += 1
        pool.set_owner(i % 2, f"tenant {i}")
        pool.add("somebody", np.arange(i, i + 40) % 500, 20)
        pool.send()
        if has_time(i):
            pool.store()
        waiting.append(len(pool._added))
        ages.append(clock.time - pool._created[pool.owner >= 0].min(initial=clock.time))
    return max(waiting), max(ages)


def test_what_was_told_is_taken_in_though_there_is_never_time(monkeypatch):
    waiting, age = crowd(monkeypatch)
    assert 30 <= waiting <= 40 and 40 < age <= 50
    assert crowd(monkeypatch, lambda i: i % 3 == 0)[0] <= 6  # there is
    monkeypatch.setattr("draftproof.propose.suffix_pool.MAX_DEFERRED_STEPS", 1000)  # control
    assert crowd(monkeypatch)[0] == 300


def test_control_a_pool_that_forgets_to_forget(monkeypatch):
    pool = Pool(OPS, 2, 64 * LINE_TOKENS, 3600.0)
    monkeypatch.setattr(pool, "_make_room", lambda n: np.argsort(pool._used, kind="stable")[:n])
    with contextlib.suppress(KeyError):
        flood(pool, 300)
    assert held(pool)[1] > 64


@pytest.mark.parametrize("count", [1, 2, 5])
def test_nothing_is_compiled_when_lines_are_taken_in(count):
    """One line lies in memory as a part of one array, several do not."""
    told = PoolHarness(num_lines=8)
    for i in range(count):
        told.pool.add(None, np.arange(50 * i, 50 * i + 30), 2)
    told.pool.send(), told.pool.send()
    assert len(told.pool._lines) == count and len(index_lines.signatures) == 1


def unused_goes(told):
    """Three lines; the first is used, then a fourth comes: which is gone?"""
    for i in range(3):
        told.add([1, 2, *range(100 * (i + 1), 100 * (i + 1) + 20)])
    assert told.guess([100, 101, 102]) != []
    told.add([1, 2, *range(400, 420)])
    told.add([1, 2, *range(500, 520)])
    return [bool(told.guess([100 * i, 100 * i + 1, 100 * i + 2])) for i in (1, 2, 3, 4, 5)]


def test_the_longest_unused_makes_room():
    assert unused_goes(PoolHarness(num_lines=3)) == [True, False, False, True, True]


def test_control_use_that_is_not_heard_of(monkeypatch):
    told = PoolHarness(num_lines=3)
    whole = Pool._insert
    monkeypatch.setattr(Pool, "_insert", lambda self, said, used: whole(self, said, 0 * used))
    assert unused_goes(told) == [False, False, True, True, True]


def test_what_is_old_is_nobodys():
    told = PoolHarness(ttl=60.0)
    told.add(STORY)
    told.clock.time += 59
    told.add([1, 2, *range(300, 320)])
    assert told.guess([14, 15, 16]) != []
    told.clock.time += 1
    assert told.guess([14, 15, 16]) == [] and told.guess([300, 301, 302]) != []
    assert int((told.pool.device.owner != NO_OWNER).sum()) == 1
    told.clock.time += 60
    assert told.guess([300, 301, 302]) == [] and not told.pool._lines


def test_what_is_said_again_stays_young_and_counts_for_more():
    told = PoolHarness(ttl=60.0)
    for _ in range(3):
        told.add(STORY)
        told.clock.time += 40
    assert told.guess([14, 15, 16]) != [] and len(told.pool._lines) == 1
    assert int(told.pool.weight.max()) == 3


def test_control_a_clock_that_stands_still():
    told = PoolHarness(ttl=60.0)
    told.add(STORY)
    told.pool.now = lambda: 1000.0
    told.clock.time += 100
    assert told.guess([14, 15, 16]) != []


# --- and none of it is heard ---


def poisoned(spec, overlap):
    """Everybody's answer is in the pool, with another token after each of its beginnings."""
    setup = Setup()
    cases = [Case(i, "none", (0.0, 0.9)[i % 2], length=12 + i, prompt=False) for i in range(4)]
    engine = setup.engine({"method": "suffix", "adaptive": False, **spec}, overlap=overlap)
    pool = engine.loop.proposer.pool
    for case in cases:
        answer = reference_run(case, setup).token_ids
        prompt = tiny.prompt(case.index, case.length)
        for cut in range(len(answer)):
            wrong = [(answer[cut] + 1 + cut) % tiny.VOCAB, 5, -1, 2**31 - 1, 6]
            before = [*prompt, *answer[:cut]][
                -HASHED_NGRAM_SIZES[-1] :
            ]  # longer, and it would also know what is right
            pool.add(None, np.array([*before, *wrong]), len(before))
    batch = Batch(cases, setup, engine=engine)
    return batch.differences(), batch


@pytest.mark.parametrize("overlap", [False, True])
def test_a_poisoned_pool_changes_no_output(overlap):
    found, batch = poisoned({}, overlap)
    assert found == []
    records = batch.serve({str(a.index): reference_run(a, batch.setup).token_ids for a in batch.cases})
    assert sum(step.num_draft for r in records.values() for step in r.steps) > 20


def test_control_the_poison_would_be_heard():
    """Drafts that are taken at their word change the output: they were there."""
    found, _ = poisoned({"accept_policy": "accept_all"}, False)
    assert any("tokens" in line for line in found)


# --- options ---


def test_options_are_checked():
    for wrong in (
        {"min_match": 0},
        {"min_match": 2.0},
        {"match_prior": -1},
        {"min_token_prob": 1.5},
        {"pool_tokens": -1},
        {"pool_tokens": True},
        {"pool_ttl": "1"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            make(SuffixProposer, **wrong)


def test_the_proposer_asks_the_op():
    proposer = make(SuffixProposer, pool_tokens=LINE_TOKENS)
    proposer.start(0, tiny.request(0, SamplingParams()))
    proposer.prepare()
    columns = lines(proposer.env.ops, 4, [[5, 6, 9, 5, 6], [7]])
    draft = proposer.draft(DeviceBatch(columns, torch.tensor([0, 1]), torch.tensor([3, 2])))
    assert draft.count.tolist() == [3, 0] and draft.tokens[0, :3].tolist() == [9, 5, 6]


def test_owners_are_numbers_that_fit_and_differ():
    owners = {owner_of(f"{i}") for i in range(2000)} | {owner_of(None)}
    assert len(owners) == 2001 and all(0 <= owner < 2**63 for owner in owners)
