"""Proposers: what they find, how long they look, and when they stop asking."""

from __future__ import annotations

import random

import pytest
import torch

import tiny
from draftproof.errors import ConfigError
from draftproof.propose.ngram import NgramProposer, match_lengths
from draftproof.propose.prediction import GivenProposer, PredictionCursor
from draftproof.sampling_params import SamplingParams
from draftproof.types import DeviceBatch, FinishStatus, ProposeBatch
from exact import Batch, Case, Setup, reference_run
from opcheck import importable
from proposer_cases import Talk, lines, make

OPS = importable()
every = pytest.mark.parametrize("ops", OPS.values(), ids=OPS)


# --- ngram ---


@every
def test_what_followed_last_time_is_guessed(ops):
    talk = Talk(ops, [10, 11, 12, 13, 14, 15, 50])
    assert talk.guess(10, 11) == [12, 13, 14, 15]
    assert talk.guess(12) == [13, 14, 15, 50]
    assert talk.guess(60) == []  # 12 60 never occurred
    assert talk.guess(14, 15, budget=2) == [50, 10]


@every
def test_a_match_may_straddle_prompt_and_output(ops):
    """The n-gram 11 12 begins in the prompt and ends in the output."""
    talk = Talk(ops, [10, 11])
    assert talk.guess(12, 13, 14) == []
    assert talk.guess(11, 12) == [13, 14, 11, 12]


@every
def test_the_longest_match_counts(ops):
    prompt = [1, 2, 3, 40, 7, 7, 9, 3, 50, 8, 8]
    assert Talk(ops, prompt, 1, 3).guess(1, 2, 3, budget=1) == [40]
    assert Talk(ops, prompt, 1, 1).guess(1, 2, 3, budget=1) == [50]  # the latest 3


@every
@pytest.mark.parametrize(("smallest", "found"), [(2, True), (3, False)])
def test_the_smallest_size_is_honoured(ops, smallest, found):
    assert bool(Talk(ops, [4, 5, 6, 7, 20], smallest, 5).guess(5, 6)) is found


@every
def test_the_largest_size_is_honoured(ops):
    """With sizes up to 2 the latest 5 6 counts, with 3 the place where 4 came before it."""
    prompt = [4, 5, 6, 30, 9, 5, 6, 31, 20]
    assert Talk(ops, prompt, 2, 2).guess(4, 5, 6, budget=1) == [31]
    assert Talk(ops, prompt, 2, 3).guess(4, 5, 6, budget=1) == [30]


@every
def test_a_short_cycle_is_continued_past_its_end(ops):
    assert Talk(ops, [1, 2, 1, 2, 1], k=8).guess(2, budget=7) == [1, 2, 1, 2, 1, 2, 1]
    assert Talk(ops, [5, 5, 5], k=8).guess(5, budget=6) == [5] * 6


@every
def test_histories_too_short_to_match(ops):
    for tokens in ([5], [5, 5], [5, 6, 5]):
        assert Talk(ops, tokens, 2, 5).guess() == []
    assert Talk(ops, [5, 5], 1, 5).guess() == [5] * 4
    assert Talk(ops, [5, 5, 5], 2, 64).guess() == [5] * 4


def from_scratch(tokens, budget, smallest, largest):
    """The definition: for the longest n, the latest earlier place of the last n tokens."""
    for n in range(largest, smallest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                said = tokens[end:]
                return [said[i % len(said)] for i in range(budget)]
    return []


@every
def test_random_histories_against_the_definition(ops):
    """Three tokens, so that everything matches somewhere; all of them in one call, some with no budget."""
    chance = random.Random(4)
    for smallest, largest in ((1, 1), (1, 3), (2, 5), (3, 4), (4, 8)):
        told = [[chance.randrange(3) for _ in range(chance.randint(1, 40))] for _ in range(30)]
        budget = [chance.randint(0, 6) for _ in told]
        columns = lines(ops, 6, told, max_len=40)  # the longest fills its line
        order = chance.sample(range(30), 30)
        at = torch.tensor(order)
        batch = DeviceBatch(columns, at, torch.tensor([budget[i] for i in order]))
        drafts, count = ops.search.search_ngram(batch, smallest, largest)
        for i, line, n in zip(order, drafts.tolist(), count.tolist(), strict=True):
            assert line[:n] == from_scratch(told[i], budget[i], smallest, largest), told[i]


@every
def test_nobody_and_those_who_ended_are_given_nothing(ops):
    columns = lines(ops, 4, [[7, 8, 7, 8, 7]] * 3)
    columns.ended[1] = int(FinishStatus.STOP)
    slots, budget = torch.tensor([-1, 0, 1, 2, -1]), torch.tensor([4, 4, 4, 0, 4])
    drafts, count = ops.search.search_ngram(DeviceBatch(columns, slots, budget), 2, 5)
    assert count.tolist() == [0, 4, 0, 0, 0] and drafts[1].tolist() == [8, 7, 8, 7]


def test_the_proposer_asks_the_op_with_its_sizes():
    proposer = make(NgramProposer, prompt_lookup_min=3, prompt_lookup_max=4)
    columns = lines(proposer.env.ops, 4, [[5, 6, 9, 5, 6], [4, 5, 6, 9, 4, 5, 6]])
    draft = proposer.draft(DeviceBatch(columns, torch.tensor([0, 1]), torch.tensor([2, 2])))
    assert draft.count.tolist() == [0, 2] and draft.tokens[1, :2].tolist() == [9, 4]
    assert draft.logprobs is None and draft.probs is None and proposer.graph_safe


def test_sizes():
    def of(low=None, high=None):
        return match_lengths({"prompt_lookup_min": low, "prompt_lookup_max": high})

    assert of() == (2, 5) and of(3) == (3, 5) and of(7) == (7, 7) and of(None, 1) == (1, 1)
    for low, high in ((0, 3), (4, 3), (True, 3), (1, 65), ("2", 3)):
        with pytest.raises(ConfigError):
            of(low, high)


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


# --- given ---


class Told:
    """A request as a proposer on the host sees it."""

    def __init__(self, proposer, prompt, prediction=()):
        self.proposer, self.tokens = proposer, list(prompt)
        request = tiny.request(0, SamplingParams(), prompt_token_ids=prompt, prediction_ids=prediction)
        proposer.start(1, request)

    def guess(self, *new, budget=4):
        self.tokens += new
        columns = lines(self.proposer.env.ops, 4, [[7], self.tokens])
        batch = ProposeBatch(columns, [1], [budget], [len(self.tokens)], None, [], [])
        draft = self.proposer.propose(batch)
        return draft.tokens[0, : int(draft.count[0])].tolist()


def test_a_prediction_is_followed_from_its_start():
    talk = Told(make(GivenProposer), [1, 2], prediction=[30, 31, 32, 33, 34, 35])
    assert talk.guess() == [30, 31, 32, 33]
    assert talk.guess(30, 31) == [32, 33, 34, 35]
    assert talk.guess(32, 33, 34, 35) == []  # it is used up


def test_a_prediction_is_found_again_after_a_divergence():
    talk = Told(make(GivenProposer), [1], prediction=[30, 31, 32, 33, 34, 35, 36, 37])
    assert talk.guess(30, 31) == [32, 33, 34, 35]
    assert talk.guess(77) == []  # an edit
    assert talk.guess(78) == []
    assert talk.guess(34) == []  # one token is not enough for the smallest size, 2
    assert talk.guess(35) == [36, 37]


def test_after_a_divergence_the_nearest_place_further_on_counts():
    prediction = [40, 41, 50, 60, 40, 41, 51, 61, 40, 41, 52, 62]
    talk = Told(make(GivenProposer), [1], prediction)
    assert talk.guess(40, 41, 50, 99) == []
    assert talk.guess(40, 41, budget=2) == [51, 61]


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (2, 5), (3, 4)])
def test_a_prediction_is_searched_by_the_rule(smallest, largest):
    """The longest match of the last tokens; of several, the nearest behind where it was left."""
    chance = random.Random(smallest)
    for _ in range(200):
        prediction = [chance.randrange(4) for _ in range(chance.randint(1, 14))]
        cursor = PredictionCursor(prediction, 0, smallest, largest)
        said, at, left = [], 0, 0
        for _ in range(12):
            said.append(chance.randrange(4))
            if at is not None and at < len(prediction):
                left = left if prediction[at] == said[-1] else at
            if at is not None and at < len(prediction) and prediction[at] == said[-1]:
                at += 1
            else:
                at = None
                for n in range(min(largest, len(said)), smallest - 1, -1):
                    found = [e for e in range(n, len(prediction)) if prediction[e - n : e] == said[-n:]]
                    if found:
                        at = next((e for e in found if e >= left), found[-1])
                        break
            cursor.advance(said[-1:])
            assert cursor.position == at and cursor.next_tokens(3) == (
                [] if at is None else prediction[at : at + 3]
            )


def test_no_prediction_no_drafts():
    assert Told(make(GivenProposer), [1, 2, 3]).guess(4, 5) == []


def test_an_edited_prediction_saves_most_steps():
    """Tokens dropped and changed: found again behind each edit, in a real run, without a difference."""
    setup, case = Setup(), Case(7, "none", 1.3, length=20)
    batch = Batch([case], setup, {"method": "given", "num_speculative_tokens": 8})
    assert batch.differences() == []
    answer = reference_run(case, setup).token_ids
    record = batch.serve({"7": answer})["7"]
    assert len(record.steps) < len(answer) - 3
