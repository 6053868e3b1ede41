"""N-gram and prediction proposers."""

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
from proposer_cases import lines, make

OPS = importable()
every = pytest.mark.parametrize("ops", OPS.values(), ids=OPS)


# --- ngram ---


CYCLE = [1, 2, 1, 2, 1]
TWO_PLACES = [4, 5, 6, 30, 9, 5, 6, 31, 20]
LONGEST = [1, 2, 3, 40, 7, 7, 9, 3, 50, 8, 8]


@every
@pytest.mark.parametrize(
    ("tokens", "sizes", "budget", "expected"),
    [
        ([10, 11, 12, 13, 14, 15, 50, 10, 11], (2, 5), 4, [12, 13, 14, 15]),
        ([10, 11, 12, 13, 14, 15, 50, 12, 60], (2, 5), 4, []),
        ([10, 11, 12, 13, 14, 15, 50, 14, 15], (2, 5), 2, [50, 14]),
        ([*LONGEST, 1, 2, 3], (1, 3), 1, [40]),  # the longest match
        ([*LONGEST, 1, 2, 3], (1, 1), 1, [50]),  # the latest place
        ([4, 5, 6, 7, 20, 5, 6], (3, 5), 4, []),  # smallest size
        ([*TWO_PLACES, 4, 5, 6], (2, 2), 1, [31]),  # largest size
        ([*TWO_PLACES, 4, 5, 6], (2, 3), 1, [30]),
        ([*CYCLE, 2], (2, 5), 7, [1, 2, 1, 2, 1, 2, 1]),  # a cycle continues past its end
        ([5], (2, 5), 4, []),
        ([5, 5], (2, 5), 4, []),
        ([5, 6, 5], (2, 5), 4, []),
        ([5, 5], (1, 5), 4, [5] * 4),
        ([5, 5, 5], (2, 64), 4, [5] * 4),
    ],
)
def test_tokens_after_the_latest_longest_match_are_drafted(ops, tokens, sizes, budget, expected):
    columns = lines(ops, 8, [[7, 8, 7, 8, 7], tokens])
    batch = DeviceBatch(columns, torch.tensor([1]), torch.tensor([budget]))
    drafts, count, matched = ops.search.search_ngram(batch, *sizes)
    assert drafts.shape == (1, 8) and count.shape == (1,) == matched.shape
    assert drafts[0, : int(count[0])].tolist() == expected


def search_by_definition(tokens, budget, smallest, largest):
    """Return tokens after the latest place of the longest match, and its length, by definition."""
    for n in range(largest, smallest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                tail = tokens[end:]
                return [tail[i % len(tail)] for i in range(budget)], n if budget else 0
    return [], 0


@every
def test_random_histories_equal_the_definition(ops):
    """Three tokens, so that most histories match; all in one call, some without a budget."""
    chance = random.Random(4)
    for smallest, largest in ((1, 1), (1, 3), (2, 5), (3, 4), (4, 8)):
        histories = [[chance.randrange(3) for _ in range(chance.randint(1, 40))] for _ in range(30)]
        budget = [chance.randint(0, 6) for _ in histories]
        columns = lines(ops, 6, histories, max_len=40)  # the longest history fills its line
        order = chance.sample(range(30), 30)
        at = torch.tensor(order)
        batch = DeviceBatch(columns, at, torch.tensor([budget[i] for i in order]))
        drafts, count, matched = ops.search.search_ngram(batch, smallest, largest)
        for i, line, n, m in zip(order, drafts.tolist(), count.tolist(), matched.tolist(), strict=True):
            want = search_by_definition(histories[i], budget[i], smallest, largest)
            assert (line[:n], m) == want, histories[i]


@every
def test_empty_and_finished_slots_get_no_drafts(ops):
    columns = lines(ops, 4, [[7, 8, 7, 8, 7]] * 3)
    columns.finish_status[1] = int(FinishStatus.STOP)
    slots, budget = torch.tensor([-1, 0, 1, 2, -1]), torch.tensor([4, 4, 4, 0, 4])
    drafts, count, matched = ops.search.search_ngram(DeviceBatch(columns, slots, budget), 2, 5)
    assert count.tolist() == [0, 4, 0, 0, 0] and matched.tolist() == [0, 3, 0, 0, 0]
    assert drafts[1].tolist() == [8, 7, 8, 7]


def test_ngram_proposer_passes_its_sizes_to_the_op():
    proposer = make(NgramProposer, prompt_lookup_min=3, prompt_lookup_max=4)
    columns = lines(proposer.env.ops, 4, [[5, 6, 9, 5, 6], [4, 5, 6, 9, 4, 5, 6]])
    draft = proposer.draft(DeviceBatch(columns, torch.tensor([0, 1]), torch.tensor([2, 2])))
    assert draft.count.tolist() == [0, 2] and draft.tokens[1, :2].tolist() == [9, 4]
    assert draft.logprobs is None and draft.probs is None and proposer.graph_safe


def test_longer_match_is_preferred_to_a_later_one():
    """The last five tokens of a copy are also at another place; a longer match has the right one."""
    common = [21, 22, 23, 24, 25]
    text = [11, 12, 13, *common, 31, 32, 41, *common, 51, 52, 11, 12, 13, *common]
    for options, expected in (({}, [31, 32]), ({"prompt_lookup_max": 5}, [51, 52])):
        proposer = make(NgramProposer, **options)
        columns = lines(proposer.env.ops, 4, [text])
        draft = proposer.draft(DeviceBatch(columns, torch.tensor([0]), torch.tensor([2])))
        assert draft.tokens[0, :2].tolist() == expected


def test_match_lengths_are_checked():
    def lengths(low=None, high=None):
        return match_lengths({"prompt_lookup_min": low, "prompt_lookup_max": high})

    assert (
        lengths() == (2, 16)
        and lengths(3) == (3, 16)
        and lengths(17) == (17, 17)
        and lengths(None, 1) == (1, 1)
    )
    for low, high in ((0, 3), (4, 3), (True, 3), (1, 65), ("2", 3)):
        with pytest.raises(ConfigError):
            lengths(low, high)


def test_repeated_phrase_is_drafted_and_accepted():
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


class HostRequest:
    """A request as a host proposer receives it."""

    def __init__(self, proposer, prompt, prediction=()):
        self.proposer, self.tokens = proposer, list(prompt)
        request = tiny.request(0, SamplingParams(), prompt_token_ids=prompt, prediction_ids=prediction)
        proposer.start(1, request)

    def drafts_after(self, *new, budget=4):
        self.tokens += new
        columns = lines(self.proposer.env.ops, 4, [[7], self.tokens])
        batch = ProposeBatch(columns, [1], [budget], [len(self.tokens)], None, [], [])
        draft = self.proposer.propose(batch)
        return draft.tokens[0, : int(draft.count[0])].tolist()


def test_prediction_is_drafted_from_its_start():
    request = HostRequest(make(GivenProposer), [1, 2], prediction=[30, 31, 32, 33, 34, 35])
    assert request.drafts_after() == [30, 31, 32, 33]
    assert request.drafts_after(30, 31) == [32, 33, 34, 35]
    assert request.drafts_after(32, 33, 34, 35) == []


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (2, 5), (3, 4)])
def test_prediction_cursor_equals_the_definition(smallest, largest):
    chance = random.Random(smallest)
    for _ in range(200):
        prediction = [chance.randrange(4) for _ in range(chance.randint(1, 14))]
        cursor = PredictionCursor(prediction, 0, smallest, largest)
        tail, at, left = [], 0, 0
        for _ in range(12):
            tail.append(chance.randrange(4))
            if at is not None and at < len(prediction):
                left = left if prediction[at] == tail[-1] else at
            if at is not None and at < len(prediction) and prediction[at] == tail[-1]:
                at += 1
            else:
                at = None
                for n in range(min(largest, len(tail)), smallest - 1, -1):
                    found = [e for e in range(n, len(prediction)) if prediction[e - n : e] == tail[-n:]]
                    if found:
                        at = next((e for e in found if e >= left), found[-1])
                        break
            cursor.advance(tail[-1:])
            assert cursor.position == at and cursor.next_tokens(3) == (
                [] if at is None else prediction[at : at + 3]
            )


def test_no_prediction_gives_no_drafts():
    assert HostRequest(make(GivenProposer), [1, 2, 3]).drafts_after(4, 5) == []


def test_edited_prediction_is_exact_and_saves_steps():
    setup, case = Setup(), Case(7, "none", 1.3, length=20)
    batch = Batch([case], setup, {"method": "given", "num_speculative_tokens": 8})
    assert batch.differences() == []
    answer = reference_run(case, setup).token_ids
    record = batch.serve({"7": answer})["7"]
    assert len(record.steps) < len(answer) - 3
