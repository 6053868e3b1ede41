"""Proposers: what they find, how long they look, and when they stop asking."""

from __future__ import annotations

import pytest
import torch

import proposers
import tiny
from draftproof.engine.budget import MAX_PAUSE, DraftBudget
from draftproof.errors import ConfigError
from draftproof.ops import resolve
from draftproof.propose import ProposerEnv, ngram_sizes
from draftproof.propose.given import GivenProposer
from draftproof.propose.history import History
from draftproof.propose.ngram import NgramProposer
from draftproof.sampling_params import SamplingParams
from draftproof.types import ProposeBatch
from exact import Ask, Company, Where, solo


def make(kind, k=4, **options):
    env = ProposerEnv(
        ops=resolve("torch", torch.device("cpu")),
        k=k,
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        num_slots=2,
        num_pages=8,
        page_size=16,
        max_len=128,
        max_rows=64,
    )
    return kind(env, options)


class Talk:
    """A request as a proposer sees it: a prompt, then tokens as they are committed."""

    def __init__(self, proposer, prompt, prediction=()):
        self.proposer, self.tokens = proposer, list(prompt)
        request = tiny.request(0, SamplingParams(), prompt_token_ids=prompt, prediction_ids=prediction)
        proposer.start(1, request)

    def guess(self, *new, budget=4):
        self.tokens += new
        columns = tiny.engine(max_num_seqs=2).loop.slots.columns
        with torch.inference_mode():
            columns.tokens[1, : len(self.tokens)] = torch.tensor(self.tokens)
        batch = ProposeBatch(columns, [1], [budget], [len(self.tokens)], None, [], [])
        draft = self.proposer.propose(batch)
        return draft.tokens[0, : int(draft.count[0])].tolist()


# --- ngram --------------------------------------------------------------------------------------------


def test_what_followed_last_time_is_guessed():
    talk = Talk(make(NgramProposer), [10, 11, 12, 13, 14, 15, 50])
    assert talk.guess(10, 11) == [12, 13, 14, 15]
    assert talk.guess(12) == [13, 14, 15, 50]
    assert talk.guess(60) == []  # 12 60 never occurred
    assert talk.guess(14, 15, budget=2) == [50, 10]


def test_a_match_may_straddle_prompt_and_output():
    """The n-gram 11 12 begins in the prompt and ends in the output."""
    talk = Talk(make(NgramProposer), [10, 11])
    assert talk.guess(12, 13, 14) == []
    assert talk.guess(11, 12) == [13, 14, 11, 12]


def test_the_longest_match_counts():
    prompt = [1, 2, 3, 40, 7, 7, 9, 3, 50, 8, 8]
    long_first = Talk(make(NgramProposer, prompt_lookup_min=1, prompt_lookup_max=3), prompt)
    assert long_first.guess(1, 2, 3, budget=1) == [40]
    short_only = Talk(make(NgramProposer, prompt_lookup_min=1, prompt_lookup_max=1), prompt)
    assert short_only.guess(1, 2, 3, budget=1) == [50]  # the latest 3


@pytest.mark.parametrize(("smallest", "found"), [(2, True), (3, False)])
def test_the_smallest_size_is_honoured(smallest, found):
    talk = Talk(make(NgramProposer, prompt_lookup_min=smallest, prompt_lookup_max=5), [4, 5, 6, 7, 20])
    assert bool(talk.guess(5, 6)) is found


def test_the_largest_size_is_honoured():
    """With sizes up to 2 the latest 5 6 counts, with 3 the place where 4 came before it."""
    prompt = [4, 5, 6, 30, 9, 5, 6, 31, 20]
    assert Talk(make(NgramProposer, prompt_lookup_max=2), prompt).guess(4, 5, 6, budget=1) == [31]
    assert Talk(make(NgramProposer, prompt_lookup_max=3), prompt).guess(4, 5, 6, budget=1) == [30]


def test_a_short_cycle_is_continued_past_its_end():
    assert Talk(make(NgramProposer, k=8), [1, 2, 1, 2, 1]).guess(2, budget=7) == [1, 2, 1, 2, 1, 2, 1]
    assert Talk(make(NgramProposer, k=8), [5, 5, 5]).guess(5, budget=6) == [5] * 6


def test_sizes():
    def of(low=None, high=None):
        return ngram_sizes({"prompt_lookup_min": low, "prompt_lookup_max": high})

    assert of() == (2, 5) and of(3) == (3, 5) and of(7) == (7, 7) and of(None, 1) == (1, 1)
    for low, high in ((0, 3), (4, 3), (True, 3), (1, 65), ("2", 3)):
        with pytest.raises(ConfigError):
            of(low, high)


class Counting(dict):
    """A table that counts what is done to it."""

    def __init__(self):
        super().__init__()
        self.puts = self.gets = 0

    def __setitem__(self, key, value):
        self.puts += 1
        super().__setitem__(key, value)

    def get(self, *args):
        self.gets += 1
        return super().get(*args)


def test_history_does_not_rescan():
    history = History(2, 4)
    history._next = {n: Counting() for n in history.sizes}
    tables = list(history._next.values())
    history.extend(range(100))
    assert sum(t.puts for t in tables) == 98 + 97 + 96  # each n-gram with a token after it, once
    for token in range(100, 400):
        puts, gets = sum(t.puts for t in tables), sum(t.gets for t in tables)
        history.extend([token])
        history.find(history.tokens[-4:])
        assert sum(t.puts for t in tables) - puts == 3  # one for each size
        assert sum(t.gets for t in tables) - gets == 3


def test_pieces_and_a_whole_make_the_same_history():
    tokens = [(7 * i * i + i) % 5 for i in range(60)]
    whole, pieces = History(1, 3), History(1, 3)
    whole.extend(tokens)
    for at in range(0, 60, 7):
        pieces.extend(tokens[at : at + 7])
    assert whole._next == pieces._next


def test_a_planted_repetition_is_found_in_a_real_run():
    """A processor makes the model repeat a phrase of its prompt: nearly all drafts stand."""
    phrase = [20, 31, 42, 53, 64, 75, 86]

    def copy(tokens, row):
        row = row.clone()
        row[phrase[(phrase.index(tokens[-1]) + 1) % 7] if tokens[-1] in phrase else phrase[0]] += 100
        return row

    params = SamplingParams(max_tokens=40, temperature=0.7, logits_processors=[copy])
    request = tiny.request(0, params, prompt_token_ids=[5, *phrase, 5, phrase[0]])
    record = tiny.run(tiny.engine(speculative={"method": "ngram"}), [request])["0"]
    drafted = sum(step.num_draft for step in record.steps)
    accepted = sum(step.num_accepted for step in record.steps)
    assert accepted >= 0.9 * drafted > 20 and len(record.steps) <= 12
    assert {name for step in record.steps for name in step.sources} == {"ngram"}


# --- given --------------------------------------------------------------------------------------------


def test_a_prediction_is_followed_from_its_start():
    talk = Talk(make(GivenProposer), [1, 2], prediction=[30, 31, 32, 33, 34, 35])
    assert talk.guess() == [30, 31, 32, 33]
    assert talk.guess(30, 31) == [32, 33, 34, 35]
    assert talk.guess(32, 33, 34, 35) == []  # it is used up


def test_a_prediction_is_found_again_after_a_divergence():
    talk = Talk(make(GivenProposer), [1], prediction=[30, 31, 32, 33, 34, 35, 36, 37])
    assert talk.guess(30, 31) == [32, 33, 34, 35]
    assert talk.guess(77) == []  # an edit
    assert talk.guess(78) == []
    assert talk.guess(34) == []  # one token is not enough for the smallest size, 2
    assert talk.guess(35) == [36, 37]


def test_after_a_divergence_the_nearest_place_further_on_counts():
    prediction = [40, 41, 50, 60, 40, 41, 51, 61, 40, 41, 52, 62]
    talk = Talk(make(GivenProposer), [1], prediction)
    assert talk.guess(40, 41, 50, 99) == []
    assert talk.guess(40, 41, budget=2) == [51, 61]


def test_no_prediction_no_drafts():
    assert Talk(make(GivenProposer), [1, 2, 3]).guess(4, 5) == []


def test_an_edited_prediction_saves_most_steps():
    """Tokens dropped and changed: found again behind each edit, in a real run, without a difference."""
    where, ask = Where(), Ask(7, "none", 1.3, length=20)
    company = Company([ask], where, {"method": "given", "num_speculative_tokens": 8})
    assert company.differences() == []
    answer = solo(ask, where).token_ids
    record = company.serve({"7": answer})["7"]
    assert len(record.steps) < len(answer) - 3


# --- budget -------------------------------------------------------------------------------------------


def taken(budget, accepts, steps):
    """The draft lengths of `steps` windows in which `accepts(n)` of n drafts stand."""
    lengths = []
    for _ in range(steps):
        lengths.append(budget.take())
        budget.record(lengths[-1], accepts(lengths[-1]))
    return lengths


def test_the_budget_backs_off_and_pauses_longer_each_time():
    lengths = taken(DraftBudget(8, True), lambda n: 0, 400)
    assert lengths[:5] == [2, 1, 0, 0, 1]
    assert max(lengths[2:]) == 1
    probes = [i for i, n in enumerate(lengths) if n == 1]
    gaps = [b - a - 1 for a, b in zip(probes, probes[1:], strict=False)]
    assert gaps[:5] == [2, 4, 8, 16, MAX_PAUSE] and set(gaps[5:]) == {MAX_PAUSE}


def test_the_budget_doubles_while_drafts_stand():
    budget = DraftBudget(8, True)
    assert taken(budget, lambda n: n, 4) == [2, 4, 8, 8]
    taken(budget, lambda n: 0, 50)
    lengths = taken(budget, lambda n: n, 60)
    begin = lengths.index(1)
    assert lengths[begin:] == [1, 2, 4] + [8] * (60 - begin - 3)
    assert taken(budget, lambda n: 0, 7) == [8, 4, 2, 1, 0, 0, 1]  # the pause is short again


def test_the_budget_follows_what_stood():
    budget = DraftBudget(8, True)
    budget.record(8, 3)
    assert budget.take() == 4
    budget.record(2, 2)  # cut short by the rows of a step: all stood
    assert budget.take() == 8


def test_windows_without_drafts_say_nothing_and_a_fixed_budget_stays():
    budget = DraftBudget(8, True)
    for _ in range(20):
        budget.record(0, 0)
    assert budget.take() == 2
    assert set(taken(DraftBudget(5, False), lambda n: 0, 50)) == {5}
    assert set(taken(DraftBudget(0, True), lambda n: 0, 5)) == {0}


def test_junk_costs_little():
    """Backing off in a real run: far fewer drafts than a fixed length asks for, and the same tokens."""
    params = SamplingParams(max_tokens=60, temperature=0.7, ignore_eos=True)
    drafted, tokens = [], []
    for adaptive in (True, False):
        proposers.set_answers({})
        spec = {"method": "proposers:Flaky", "num_speculative_tokens": 8, "adaptive": adaptive}
        record = tiny.run(tiny.engine(speculative=spec), [tiny.request(0, params)])["0"]
        drafted.append(sum(step.num_draft for step in record.steps))
        tokens.append(record.token_ids)
    assert tokens[0] == tokens[1]
    assert drafted[0] < drafted[1] / 5
