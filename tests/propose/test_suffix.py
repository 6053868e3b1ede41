"""Suffix proposer: drafts, owners, size and age of its pool, and exact output."""

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
    """A pool and slots that search it."""

    def __init__(self, num_lines=4, ttl=60.0):
        self.clock = Clock()
        self.pool = Pool(OPS, 2, num_lines * LINE_TOKENS, ttl, self.clock)

    def add(self, ids, salt=None, begin=2):
        self.pool.add(salt, np.array(ids), begin)
        self.pool.send()
        self.pool.send()

    def search(self, text, salt=None, k=6, rule=RULE, begun=()):
        """Return the drafts after this text."""
        self.pool.set_owner(1, salt)
        self.pool.send()
        columns = lines(OPS, k, [[7], list(text)], max_len=300)
        had = torch.tensor([len(begun)])
        drafts = torch.zeros((1, k), dtype=torch.int64)
        drafts[0, : len(begun)] = torch.tensor(begun, dtype=torch.int64)
        batch = DeviceBatch(columns, torch.tensor([1]), torch.tensor([k]))
        tokens, count, expected = OPS.search.search_suffix(batch, self.pool.device, rule, (drafts, had))
        assert (int(expected) > 0) == (int(count) > len(begun))
        return tokens[0, : int(count)].tolist()


STORY = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]


# --- drafts ---


def test_text_of_another_request_is_drafted():
    harness = PoolHarness()
    assert harness.search([50, 51, 14, 15, 16]) == []
    harness.add(STORY)
    assert harness.search([50, 51, 14, 15, 16]) == [17, 18, 19, 20, 21, 22]
    assert harness.search([50, 51, 60, 15, 16]) == []  # matches have at least three tokens
    assert harness.search([50, 51, 18, 19, 20, 21]) == [22, 23]  # end of the line


def test_start_of_a_response_is_found_by_the_end_of_its_prompt():
    harness = PoolHarness()
    harness.add(STORY, begin=5)
    assert (
        harness.search([13, 14, 15])[:1] == [16] and harness.search([12, 13, 14]) == []
    )  # prompts are not in the pool


def test_most_frequent_continuation_is_drafted_if_likely():
    harness = PoolHarness()
    for after in (30, 31, 31, 31):
        harness.add([1, 2, after + 10, 5, 6, 7, after, after + 1], begin=2)
    assert harness.search([5, 6, 7])[:1] == [31]
    harness = PoolHarness(num_lines=8)
    for after in range(30, 38):
        harness.add([1, 2, after + 10, 5, 6, 7, after, after + 1], begin=2)
    assert harness.search([5, 6, 7]) == []  # one in eight
    assert harness.search([38 + 10, 5, 6, 7], rule=SuffixOptions(1, 0.0, 0.01)) != []


def test_longer_match_gives_more_drafts():
    harness = PoolHarness()
    harness.add(STORY)
    few, many = (
        harness.search([14, 15, 16], rule=SuffixOptions(1, 1.5, 0.4)),
        harness.search(STORY[:9], rule=RULE),
    )
    assert len(few) == 2 and many == STORY[9:]


def test_repetition_in_the_text_continues_past_its_end():
    assert PoolHarness().search([40, 41, 42, 40, 41, 42, 40]) == [41, 42, 40, 41, 42, 40]


def test_drafts_of_another_member_are_extended():
    harness = PoolHarness()
    harness.add(STORY)
    assert harness.search([50, 14, 15], begun=[16, 17], k=5) == [16, 17, 18, 19, 20]
    assert harness.search([50, 14, 15], begun=[60, 61]) == [60, 61]
    assert harness.search([50, 14, 15, 16], begun=[17, 18], k=2) == [17, 18]


def test_long_response_uses_several_lines_and_is_found_everywhere():
    harness = PoolHarness(num_lines=8)
    text = [int(x) for x in np.random.default_rng(3).permutation(900) + 100]
    harness.add(text)
    body = BODY_TOKENS
    for at in (20, body - 1, body, body + 2, body + MAX_MATCH_TOKENS, 2 * body + 1, 880):
        assert harness.search(text[at - 5 : at], k=4) == text[at : at + 4], at


# --- owners ---


def finds_text_of(salts):
    harness = PoolHarness()
    harness.add(STORY, salt=salts[0])
    return harness.search([14, 15, 16], salt=salts[1]) != []


def test_salts_share_no_lines():
    assert finds_text_of(("a", "a")) and finds_text_of((None, None)) and finds_text_of((None, ""))
    assert not finds_text_of(("a", "b")) and not finds_text_of((None, "b")) and not finds_text_of(("a", None))
    assert finds_text_of(("\ud800", "\ud800")) and not finds_text_of(("\ud800", "\ud801"))  # any string


def test_reused_line_belongs_to_its_new_owner():
    """Stale entries of the table must not match."""
    harness = PoolHarness(num_lines=1)
    harness.add(STORY, salt="a")
    harness.add(STORY, salt="b")
    assert harness.search([14, 15, 16], salt="a") == [] and harness.search([14, 15, 16], salt="b") != []


def test_control_equal_owners_share_lines(monkeypatch):
    monkeypatch.setattr(pools, "owner_of", lambda salt: 5)
    assert finds_text_of(("a", "b"))


def accepted_in_two_runs(salts, **options):
    """Serve a request twice, one after the other; return the accepted drafts of each."""
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


def test_second_run_is_drafted_from_the_pool():
    first, second = accepted_in_two_runs([None, None])
    assert second >= 16 > first
    first, second = accepted_in_two_runs(["a", "b"])
    assert second == first
    first, second = accepted_in_two_runs([None, None], pool_tokens=0)
    assert second == first


@pytest.mark.parametrize(
    "spec",
    [{"method": "suffix"}, {"method": "hybrid", "proposers": [{"method": "ngram"}, {"method": "suffix"}]}],
)
def test_pool_does_not_prevent_overlap(spec):
    cases = [Case(i, "none", 0.7, length=9 + i, prompt=False) for i in range(6)]
    engine = Setup().engine(spec, overlap=True, max_num_seqs=3)
    watch = Watch(engine)
    assert Batch(cases, Setup(), engine=engine).differences() == []
    ahead, waited = watch.check()
    assert waited == 0 and ahead >= len(watch.launched) - 4 > 10


def test_aborted_request_is_added_to_the_pool():
    target = tiny.engine(speculative={"method": "suffix"}, overlap=True)
    target.add(tiny.request(0, SamplingParams(max_tokens=100, ignore_eos=True)))
    for _ in range(20):
        target.step()
    target.abort("0")
    tiny.run(target, [tiny.request(1, SamplingParams(max_tokens=3))])
    assert (target.loop.proposer.pool.owner != NO_OWNER).sum() >= 1


# --- size and age ---


def sizes_of(pool):
    """Return bytes of the columns and lengths of the lists that could grow."""
    device = pool.device
    sizes = sum(getattr(device, name).nbytes for name in device.__slots__)
    return sizes, max(len(pool._lines), len(pool._digests)), len(pool._added)


def add_many(pool, requests, first=0):
    chance = np.random.default_rng(first)
    for i in range(first, first + requests):
        pool.set_owner(i % 2, f"owner {i}")
        pool.add(f"owner {i % 5000}", chance.integers(0, 500, 40), 20)
        if i % 8 == 7:
            pool.send()
            pool.send()


def test_memory_does_not_grow_with_requests():
    pool = Pool(OPS, 2, 64 * LINE_TOKENS, 3600.0)
    add_many(pool, 8000)
    before = sizes_of(pool)
    assert before[1] == 64 and before[2] == 0
    tracemalloc.start()  # slow
    start = tracemalloc.get_traced_memory()[0]
    add_many(pool, 2000, first=8000)
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    assert sizes_of(pool) == before and grown < 100_000, grown


def add_every_step(monkeypatch, is_idle=lambda i: False):
    """Return the largest number of pending lines and the largest age, with an arrival in every step."""
    monkeypatch.setattr(OPS.runtime, "asynchronous", True)
    clock, waiting, ages = Clock(), [], []
    pool = Pool(OPS, 2, 64 * LINE_TOKENS, 50.0, clock)
    for i in range(300):
        clock.time += 1
        pool.set_owner(i % 2, f"owner {i}")
        pool.add("salt", np.arange(i, i + 40) % 500, 20)
        pool.send()
        if is_idle(i):
            pool.store()
        waiting.append(len(pool._added))
        ages.append(clock.time - pool._created[pool.owner >= 0].min(initial=clock.time))
    return max(waiting), max(ages)


def test_lines_are_stored_within_a_bound_without_idle_time(monkeypatch):
    waiting, age = add_every_step(monkeypatch)
    assert 30 <= waiting <= 40 and 40 < age <= 50
    assert add_every_step(monkeypatch, lambda i: i % 3 == 0)[0] <= 6  # idle
    monkeypatch.setattr("draftproof.propose.suffix_pool.MAX_DEFERRED_STEPS", 1000)  # control
    assert add_every_step(monkeypatch)[0] == 300


def test_control_pool_without_eviction_grows(monkeypatch):
    pool = Pool(OPS, 2, 64 * LINE_TOKENS, 3600.0)
    monkeypatch.setattr(pool, "_make_room", lambda n: np.argsort(pool._used, kind="stable")[:n])
    with contextlib.suppress(KeyError):
        add_many(pool, 300)
    assert sizes_of(pool)[1] > 64


@pytest.mark.parametrize("count", [1, 2, 5])
def test_storing_lines_compiles_one_signature(count):
    """One line is contiguous in memory, several are not."""
    harness = PoolHarness(num_lines=8)
    for i in range(count):
        harness.pool.add(None, np.arange(50 * i, 50 * i + 30), 2)
    harness.pool.send(), harness.pool.send()
    assert len(harness.pool._lines) == count and len(index_lines.signatures) == 1


def lines_left(harness):
    """Fill three lines, use the first, add two more; return which of the five are left."""
    for i in range(3):
        harness.add([1, 2, *range(100 * (i + 1), 100 * (i + 1) + 20)])
    assert harness.search([100, 101, 102]) != []
    harness.add([1, 2, *range(400, 420)])
    harness.add([1, 2, *range(500, 520)])
    return [bool(harness.search([100 * i, 100 * i + 1, 100 * i + 2])) for i in (1, 2, 3, 4, 5)]


def test_least_recently_used_line_is_evicted():
    assert lines_left(PoolHarness(num_lines=3)) == [True, False, False, True, True]


def test_control_unrecorded_use_evicts_by_age(monkeypatch):
    harness = PoolHarness(num_lines=3)
    whole = Pool._insert
    monkeypatch.setattr(Pool, "_insert", lambda self, lines, used: whole(self, lines, 0 * used))
    assert lines_left(harness) == [False, False, True, True, True]


def test_old_lines_expire():
    harness = PoolHarness(ttl=60.0)
    harness.add(STORY)
    harness.clock.time += 59
    harness.add([1, 2, *range(300, 320)])
    assert harness.search([14, 15, 16]) != []
    harness.clock.time += 1
    assert harness.search([14, 15, 16]) == [] and harness.search([300, 301, 302]) != []
    assert int((harness.pool.device.owner != NO_OWNER).sum()) == 1
    harness.clock.time += 60
    assert harness.search([300, 301, 302]) == [] and not harness.pool._lines


def test_repeated_text_is_renewed_and_weighted():
    harness = PoolHarness(ttl=60.0)
    for _ in range(3):
        harness.add(STORY)
        harness.clock.time += 40
    assert harness.search([14, 15, 16]) != [] and len(harness.pool._lines) == 1
    assert int(harness.pool.weight.max()) == 3


def test_control_stopped_clock_expires_nothing():
    harness = PoolHarness(ttl=60.0)
    harness.add(STORY)
    harness.pool.now = lambda: 1000.0
    harness.clock.time += 100
    assert harness.search([14, 15, 16]) != []


# --- exactness ---


def serve_with_wrong_pool(spec, overlap):
    """Serve with every output in the pool, followed by a wrong token after each of its prefixes."""
    setup = Setup()
    cases = [Case(i, "none", (0.0, 0.9)[i % 2], length=12 + i, prompt=False) for i in range(4)]
    engine = setup.engine({"method": "suffix", "adaptive": False, **spec}, overlap=overlap)
    pool = engine.loop.proposer.pool
    for case in cases:
        answer = reference_run(case, setup).token_ids
        prompt = tiny.prompt(case.index, case.length)
        for cut in range(len(answer)):
            wrong = [(answer[cut] + 1 + cut) % tiny.VOCAB, 5, -1, 2**31 - 1, 6]
            before = [*prompt, *answer[:cut]][-HASHED_NGRAM_SIZES[-1] :]  # too short to hold the right token
            pool.add(None, np.array([*before, *wrong]), len(before))
    batch = Batch(cases, setup, engine=engine)
    return batch.differences(), batch


@pytest.mark.parametrize("overlap", [False, True])
def test_wrong_pool_changes_no_output(overlap):
    found, batch = serve_with_wrong_pool({}, overlap)
    assert found == []
    records = batch.serve({str(a.index): reference_run(a, batch.setup).token_ids for a in batch.cases})
    assert sum(step.num_draft for r in records.values() for step in r.steps) > 20


def test_control_accepting_a_wrong_pool_changes_the_output():
    found, _ = serve_with_wrong_pool({"accept_policy": "accept_all"}, False)
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


def test_proposer_drafts_what_the_op_finds():
    proposer = make(SuffixProposer, pool_tokens=LINE_TOKENS)
    proposer.start(0, tiny.request(0, SamplingParams()))
    proposer.prepare()
    columns = lines(proposer.env.ops, 4, [[5, 6, 9, 5, 6], [7]])
    draft = proposer.draft(DeviceBatch(columns, torch.tensor([0, 1]), torch.tensor([3, 2])))
    assert draft.count.tolist() == [3, 0] and draft.tokens[0, :3].tolist() == [9, 5, 6]


def test_owners_fit_in_63_bits_and_differ():
    owners = {owner_of(f"{i}") for i in range(2000)} | {owner_of(None)}
    assert len(owners) == 2001 and all(0 <= owner < 2**63 for owner in owners)
