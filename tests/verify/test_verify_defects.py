"""Known defects of FastDeploy's speculative decoding, one test each.

Defects of logprobs are in test_logprobs.py, of n-gram search in test_propose.py, of end tokens, limits and
min_tokens in test_endings.py, of penalties inside a window in test_transformers_sampling.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from draftproof.config import EngineConfig
from draftproof.engine.sequence import Sequence
from draftproof.engine.slots import Slots
from draftproof.errors import ConfigError
from draftproof.metrics import SpecStats
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import NUM_OUT, FinishStatus, LogprobKind, Request
from draftproof.verify import STRATEGIES
from scripted import GREEDY, OPS, SAMPLED, V, decide, noise, ranked, run_step, strategy
from tiny import engine, request, run


def in_slot(slots: Slots, request: Request, pages: list[int], max_length: int, **options: Any) -> Sequence:
    """Return a request that was just given one of the slots."""
    return Sequence(request, max_length, slot=slots.take(request), pages=pages, **options)


# --- verification ---


def test_row_after_a_topp_window_is_verified() -> None:
    """K=5, window 2; row 0 takes the fallback, rows 1 and 2 match, row 3 must reject: 4 tokens."""
    rows = ranked([3, 4], [8], [2], [11], [6], [5], gap=40.0)
    rows[0, 4] = 4.5
    result = decide(rows, [[4, 8, 2, 9, 6]], GREEDY, strategy("topp", max_candidate_len=1))
    assert result.tokens == [[4, 8, 2, 11]] and result.accepted == [3]


def test_topp_accepts_the_second_best_and_not_token_0() -> None:
    """In a nucleus of one, the real second best is accepted; token 0, far down the row, does not."""
    rows = ranked([3, 4], [8], [2], [6])
    params = SamplingParams(max_tokens=9, top_p=0.5)
    assert decide(rows, [[4, 8, 2]], params, "topp").accepted == [3]
    assert decide(rows, [[0, 8, 2]], params, "topp").accepted == [0]


@pytest.mark.parametrize("top_p", (0.3, 0.9, 0.999, 1.0))
def test_topp_candidate_set_is_never_empty_on_flat_distributions(top_p: float) -> None:
    """The mass of 5 candidates never reaches top_p; the best is accepted, sampling works."""
    flat = noise(400, scale=1e-3)
    best = flat.argmax(-1).view(200, 2)[:, :1]
    params = SamplingParams(max_tokens=9, top_p=top_p)
    result = decide(flat, best.tolist(), params, "topp")
    assert result.accepted == [1] * 200
    bonus = {line[1] for line in result.tokens}
    assert len(bonus) > 5, "the token after it is drawn, not always the best"


def test_topp_sampling_is_renormalised_over_candidates() -> None:
    """Three candidates kept of a larger nucleus; each as often as its share of their mass."""
    row = ranked([3, 4, 5, 6, 7], gap=0.4)
    kept = torch.softmax(row[0, [3, 4, 5]].double(), -1)
    chosen_strategy = strategy("topp", max_candidate_len=3)
    params = SamplingParams(max_tokens=9, top_p=0.95)
    count = 6000
    rows = row.expand(count, V)
    result = decide(rows, [[]] * count, params, chosen_strategy, seeds=range(count))
    tokens = [line[0] for line in result.tokens]
    counts = [tokens.count(t) for t in (3, 4, 5)]
    assert sum(counts) == count
    assert stats.chisquare(counts, [float(p) * count for p in kept]).pvalue > 1e-3
    # the defect: u scaled by top_p instead of the kept mass, so the last candidate is clipped
    clipped = [float(p) for p in kept * torch.tensor([1.0, 1.0, 0.7])]
    assert stats.chisquare(counts, [p / sum(clipped) * count for p in clipped]).pvalue < 1e-3


@pytest.mark.parametrize("name", STRATEGIES)
def test_noise_depends_on_the_seed_and_not_on_slot_or_batch(name: str) -> None:
    """Other neighbours, another slot, another call: the same token. Another seed: other tokens."""
    rows = noise(40)
    seeds = list(range(40))
    together = decide(rows, [[]] * 40, SAMPLED, name, seeds=seeds).tokens
    backwards = decide(rows.flip(0), [[]] * 40, SAMPLED, name, seeds=seeds[::-1]).tokens
    assert together == backwards[::-1]
    assert [decide(rows[i : i + 1], [[]], SAMPLED, name, seeds=[i]).tokens[0] for i in range(40)] == together
    if name != "greedy":
        assert decide(rows, [[]] * 40, SAMPLED, name, seeds=[s + 1000 for s in seeds]).tokens != together


def test_every_one_of_1500_windows_is_verified() -> None:
    """Slots beyond 512, rows beyond 1024: every one is decided, penalties too."""
    count = 1500
    best = (torch.arange(2 * count) * 7) % V
    rows = torch.nn.functional.one_hot(best, V).float() * 9
    params = SamplingParams(temperature=0, max_tokens=9, presence_penalty=1.0)
    result = decide(rows, best.view(count, 2)[:, :1].tolist(), params)
    assert result.tokens == best.view(count, 2).tolist()


def test_length_is_not_over_counted_on_eos() -> None:
    """An accepted EOS ends the window: no reserved bonus, no stale token, length to match."""
    rows = ranked([3], [7], [2], [11], gap=40)
    assert len(decide(rows, [[3, 7, 2]], GREEDY).tokens[0]) == 4  # without an end token
    result = decide(rows, [[3, 7, 2]], GREEDY, eos=(7,))
    assert result.tokens == [[3, 7]]
    assert result.outcome.table[:, NUM_OUT].tolist() == [2] and result.ended == [FinishStatus.STOP]
    columns = result.slots.columns
    assert columns.length.tolist() == [3] and columns.tokens[0, :3].tolist() == [1, 3, 7]
    assert int(columns.tokens[0, 3]) < 0, "nothing is written beyond the end"


# --- state ---


@pytest.mark.parametrize("room", (1, 2, 3, 4))
def test_history_is_written_up_to_max_model_len(room: int) -> None:
    """At the exact boundary every token is in the history, none is dropped, none is beyond."""
    rows = ranked([3], [8], [2], [11], gap=40)
    result = decide(rows, [[3, 8, 2]], SamplingParams(temperature=0, max_tokens=None), max_len=1 + room)
    columns = result.slots.columns
    assert columns.tokens[0, 1 : 1 + room].tolist() == [3, 8, 2, 11][:room] == result.tokens[0]
    assert columns.length.tolist() == [1 + room]


def test_slot_columns_are_reset_for_the_next_request() -> None:
    """Every column is the new request's own: seed, limits, penalties, end tokens."""
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    limits = {"min_tokens": 5, "max_tokens": 7, "stop_token_ids": [4, 5, 6]}
    old = SamplingParams(temperature=0.3, top_k=3, top_p=0.5, min_p=0.5, **penalties, **limits)
    used, fresh = Slots(1, 64, 3, 4, V, OPS), Slots(1, 64, 3, 4, V, OPS)
    earlier = request(0, old, 5, seed=77)
    used.fill([in_slot(used, earlier, [1, 2], 30, strategy=1, logprob_kind=LogprobKind.PROCESSED)])
    for name in ("finish_status", "num_draft", "computed"):  # as it may leave them
        getattr(used.columns, name).fill_(3)
    used.free(0)
    given_params = request(1, SamplingParams(), 3, seed=5)
    for slots in (used, fresh):
        slots.fill([in_slot(slots, given_params, [3], 9)])
    for name in used.columns.__dataclass_fields__:
        if name != "tokens":  # append-only, read up to its length
            assert torch.equal(getattr(used.columns, name), getattr(fresh.columns, name)), name


def test_bias_and_bans_of_the_previous_request_are_not_read() -> None:
    """These planes are written for requests that have them and read where LogitAdjust says so."""
    old = SamplingParams(logit_bias={3: 50.0}, allowed_token_ids=[3], min_tokens=9)
    slots = Slots(1, 64, 3, 4, V, OPS)
    for params in (old, SamplingParams(temperature=0, max_tokens=9), replace(GREEDY, logit_bias={5: -1.0})):
        given_params = request(0, params, prompt_token_ids=[1, 9])
        slots.fill([in_slot(slots, given_params, [1], 30)])
        slots.columns.computed.copy_(slots.columns.length - 1)
        tokens = run_step(slots, ranked([8, 4], gap=1.0), [strategy("target_match")]).tokens
        assert tokens == [[3]] if params is old else [[8]]
        slots.free(0)


def test_request_needs_a_seed() -> None:
    """A seed is drawn before the engine gets the request (test_llm.py checks that it is reported)."""
    with pytest.raises(TypeError):
        Request(id="x", prompt_token_ids=[1], params=SamplingParams())  # type: ignore[call-arg]


def test_each_request_has_its_own_end_tokens() -> None:
    """One batch, three sets of end tokens."""
    slots = Slots(3, 64, 3, 4, 97, OPS)
    end_tokens = [(7,), (), tuple(range(20, 40))]
    requests = [request(i, SamplingParams(), 3, eos_token_ids=eos) for i, eos in enumerate(end_tokens)]
    slots.fill([in_slot(slots, r, [i + 1], 30) for i, r in enumerate(requests)])
    held = [tuple(line.nonzero()[:, 0].tolist()) for line in slots.columns.ends]
    assert held == end_tokens
    best = {7: ranked([7], gap=40), 3: ranked([3], gap=40)}
    params = [SamplingParams(temperature=0, stop_token_ids=[t] if t else []) for t in (7, 3, 0)]
    result = decide(torch.cat([best[7], best[7], best[7]]), [[], [], []], params)
    assert result.ended == [FinishStatus.STOP, FinishStatus.RUNNING, FinishStatus.RUNNING]


# --- statistics and configuration ---


@pytest.mark.parametrize("policy", ("accept_all", "normal"))
def test_placeholder_is_never_counted_as_a_draft(policy: str) -> None:
    """Windows of 0, 1 and 3 real drafts in columns of width 3: padding is never counted."""
    rows = ranked([3], [3], [8], [3], [8], [2], [11], gap=40)
    drafts = [[], [3], [3, 8, 2]]
    result = decide(rows, drafts, GREEDY, policy={"accept_policy": policy})
    assert result.accepted == [0, 1, 3]
    spec = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
    out = run(engine(speculative=spec), [request(0, SamplingParams(temperature=0, max_tokens=40))])["0"]
    total = SpecStats()
    for step in out.steps:
        total.record(step.num_draft, step.num_accepted, len(step.token_ids))
        assert step.num_accepted <= step.num_draft <= 5
        assert len(step.token_ids) <= step.num_draft + 1
    assert total.num_emitted_tokens == 40
    assert 0 < total.num_draft_tokens == sum(s.num_draft for s in out.steps) < 5 * len(out.steps)
    assert sum(total.accepted_per_position) == total.num_accepted_tokens


def test_acceptance_rate_is_accepted_over_drafted() -> None:
    """One formula for every method; steps without drafts do not dilute it."""
    stats_ = SpecStats()
    for drafted, accepted_count, emitted in ((4, 2, 3), (0, 0, 1), (2, 2, 3)):
        stats_.record(drafted, accepted_count, emitted)
    assert stats_.acceptance_rate == 4 / 6 and stats_.acceptance_length == 7 / 3
    assert stats_.accepted_per_position == [2, 2, 0, 0]


@pytest.mark.parametrize(
    "key, nearest",
    (
        ("verify_stategy", "verify_strategy"),
        ("num_speculative_token", "num_speculative_tokens"),
        ("prompt_lookup_maximum", "prompt_lookup_max"),
    ),
)
def test_unknown_keys_are_errors(key: str, nearest: str) -> None:
    """An unknown key is an error that names the nearest one."""
    with pytest.raises(ConfigError, match=nearest):
        engine(speculative={"method": "ngram", key: 3})


def test_conflicting_keys_and_wrong_values_are_errors() -> None:
    with pytest.raises(ConfigError, match="twice"):
        SpeculativeConfig.parse({"method": "ngram", "max_ngram_size": 3, "prompt_lookup_max": 4})
    for bad in ({"num_speculative_tokens": 0}, {"num_speculative_tokens": True}, {"accept_policy": "all"}):
        with pytest.raises(ConfigError):
            SpeculativeConfig.parse({"method": "ngram", **bad})
    with pytest.raises(ConfigError, match="ngram"):
        engine(speculative={"method": "ngrams"})
    with pytest.raises(ConfigError):
        EngineConfig.parse("x", {"max_num_seq": 3})
