"""Rules of each strategy on scripted logits, acceptance policies, and mixed strategies in one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import STREAM_SAMPLE
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import FinishStatus
from draftproof.verify import STRATEGIES
from scripted import GREEDY, OPS, SAMPLED, Result, V, decide, filled_slots, noise, ranked, run_step, strategy
from tiny import engine, request, run

every = pytest.mark.parametrize("name", STRATEGIES)


# --- the rules ---


@every
@pytest.mark.parametrize("right", range(5))
def test_leading_right_drafts_are_accepted_and_one_token_follows(name: str, right: int) -> None:
    best = [3, 8, 2, 11, 6]
    draft = best[:right] + [9] * (4 - right)
    result = decide(ranked(*([b] for b in best), gap=40), [draft], GREEDY, name)
    assert result.tokens == [best[: right + 1]]
    assert result.accepted == [right]


@every
def test_no_drafts_is_plain_decoding(name: str) -> None:
    result = decide(ranked([3], [4], gap=40), [[], []], GREEDY, name)
    assert result.tokens == [[3], [4]] and result.accepted == [0, 0]


@every
def test_right_draft_after_a_wrong_one_is_rejected(name: str) -> None:
    result = decide(ranked([3], [8], [2], gap=40), [[9, 8]], GREEDY, name)
    assert result.tokens == [[3]]


def test_target_match_commits_the_sample_of_every_row() -> None:
    logits = noise(400)
    seeds = list(range(100))
    keys = torch.tensor(seeds).repeat_interleave(4)
    sample = OPS.sampling.gumbel_argmax(logits, keys, torch.arange(4).repeat(100), STREAM_SAMPLE).view(100, 4)
    drafts = sample[:, :3].clone()
    drafts[::2, 1] = (drafts[::2, 1] + 1) % V
    result = decide(logits, drafts.tolist(), SAMPLED, seeds=seeds)
    for i, (got, want) in enumerate(zip(result.tokens, sample.tolist(), strict=True)):
        assert got == (want if i % 2 else want[:2])


def test_greedy_ignores_the_temperature() -> None:
    logits = noise(40)
    best = logits.argmax(-1).view(10, 4)
    result = decide(logits, best[:, :3].tolist(), SAMPLED, "greedy")
    assert result.tokens == best.tolist()


def test_rejection_at_temperature_0_is_greedy() -> None:
    logits = noise(400)
    drafts = logits.argmax(-1).view(100, 4)[:, :3].clone()
    drafts[::3, 0] = 5
    drafts[::4, 2] = 6
    probs = torch.softmax(noise(300, seed=1), -1).view(100, 3, V)
    want = decide(logits, drafts.tolist(), GREEDY, "greedy").tokens
    assert decide(logits, drafts.tolist(), GREEDY, "rejection").tokens == want
    assert decide(logits, drafts.tolist(), GREEDY, "rejection", probs=probs).tokens == want


def test_rejection_treats_a_certain_draft_as_probability_1() -> None:
    logits, drafts = noise(400), torch.randint(0, V, (100, 3), generator=torch.Generator().manual_seed(1))
    one_hot = torch.nn.functional.one_hot(drafts, V).float()
    result = decide(logits, drafts.tolist(), SAMPLED, "rejection", probs=one_hot)
    assert result.tokens == decide(logits, drafts.tolist(), SAMPLED, "rejection").tokens
    assert 0 < sum(result.accepted) < 300


def test_rejection_accepts_every_draft_when_distributions_agree() -> None:
    logits = noise(400)
    probs = logits.softmax(-1).view(100, 4, V)[:, :3]
    drafts = logits.argmax(-1).view(100, 4)[:, :3]
    assert decide(logits, drafts.tolist(), SAMPLED, "rejection", probs=probs).accepted == [3] * 100


def test_rejection_never_accepts_tokens_of_target_probability_0() -> None:
    """The replacement has more probability under the target than under the drafter."""
    logits = noise(200)
    probs = torch.softmax(noise(100, seed=2), -1).view(100, 1, V)
    params = SamplingParams(max_tokens=20, top_k=3)
    drafts = logits.view(100, 2, V)[:, 0].argmin(-1, keepdim=True)
    result = decide(logits, drafts.tolist(), params, "rejection", probs=probs)
    assert result.accepted == [0] * 100
    kept = torch.softmax(result.sampled.processed[::2], -1)
    for i, (token,) in enumerate(result.tokens):
        assert kept[i, token] > probs[i, 0, token]


# --- topp ---


def topp(logits: Tensor, draft: list[int], params: SamplingParams = GREEDY, **options: Any) -> Result:
    return decide(logits, [draft], params, strategy("topp", **options))


def test_topp_accepts_tokens_in_the_nucleus() -> None:
    flat = ranked([3, 4, 5, 6], [1], gap=0.1)  # four tokens of nearly a quarter each
    for temperature in (1.0, 0.0):
        params = SamplingParams(temperature=temperature, max_tokens=9, top_p=0.6)
        assert [t for t in range(V) if topp(flat, [t], params, verify_window=0).accepted == [1]] == [3, 4, 5]


@pytest.mark.parametrize("limit", (1, 2, 3, 7, 11, 1000))
def test_topp_accepts_any_max_candidate_len(limit: int) -> None:
    flat = ranked([3, 4, 5, 6], [1], gap=0.1)
    accepted_count = [
        t for t in range(V) if topp(flat, [t], max_candidate_len=limit, verify_window=0).accepted == [1]
    ]
    assert accepted_count[:4] == [3, 4, 5, 6][:limit] if limit <= 4 else len(accepted_count) == min(limit, V)


def test_topp_verify_window_accepts_the_second_best_before_best_drafts() -> None:
    rows = ranked([3, 4], [8, 1], [2, 1], [11, 1], [6])
    narrow = {"max_candidate_len": 1}
    assert topp(rows, [4, 8, 2, 11], **narrow).accepted == [4]
    assert topp(rows, [4, 8, 1, 11], **narrow).accepted == [0]  # the second follower is not the best
    assert topp(rows, [4, 8, 5, 11], **narrow, verify_window=1).accepted == [2]
    assert topp(rows, [4, 8, 2, 11], **narrow, verify_window=3).accepted == [4]
    assert topp(rows, [4, 8, 2, 1], **narrow, verify_window=3).accepted == [0]
    assert topp(rows, [4, 8, 2, 11], **narrow, verify_window=0).accepted == [0]
    assert topp(rows, [4, 8, 2, 11], **narrow, verify_window=4).accepted == [0]  # there is no fourth
    assert topp(rows, [5, 8, 2, 11], **narrow).accepted == [0]  # the third best is never accepted
    assert topp(rows[:2], [4], **narrow).accepted == [0]  # the last draft has no followers


def test_topp_options_are_checked() -> None:
    spec = {"method": "ngram", "verify_strategy": "topp", "max_candidate_len": 3, "verify_window": 1}
    options = engine(speculative=spec)._strategies.default.options
    assert options == {"max_candidate_len": 3, "verify_window": 1}
    with pytest.raises(ConfigError, match="max_candidate_len"):
        engine(speculative={**spec, "max_candidate_length": 3})
    with pytest.raises(ConfigError, match="target_match"):  # not an option of this strategy
        engine(speculative={**spec, "verify_strategy": "target_match"})


# --- policies ---


@every
@pytest.mark.parametrize("params", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
def test_accept_all_accepts_every_draft(name: str, params: SamplingParams) -> None:
    logits = ranked(*([i] for i in (3, 8, 2, 11)), gap=40)
    result = decide(logits, [[9, 9, 9]], params, name, policy={"accept_policy": "accept_all"})
    assert result.tokens == [[9, 9, 9, 11]] and result.accepted == [3]
    result = decide(logits, [[9, 7, 9]], params, name, policy={"accept_policy": "accept_all"}, eos=(7,))
    assert result.tokens == [[9, 7]] and result.ended == [FinishStatus.STOP]


@every
def test_reject_all_commits_the_token_of_plain_decoding(name: str) -> None:
    logits = ranked([3], [8], gap=40)
    result = decide(logits, [[3]], GREEDY, name, policy={"accept_policy": "reject_all"}, eos=(3,))
    assert result.tokens == [[3]] and result.accepted == [0] and result.ended == [FinishStatus.STOP]


def test_reject_all_samples_as_without_drafts() -> None:
    logits = noise(100)
    plain = decide(logits, [[]] * 100, SAMPLED).tokens
    again = logits.repeat_interleave(2, 0)
    for name in ("target_match", "rejection"):
        got = decide(again, [[5]] * 100, SAMPLED, name, policy={"accept_policy": "reject_all"}).tokens
        assert got == plain


def synthetic(policy: dict[str, Any], count: int = 6000, k: int = 4) -> Tensor:
    logits = torch.zeros((1, V)).expand(count * (k + 1), V)
    policy = {"accept_policy": "synthetic", **policy}
    result = decide(logits, [[9] * k] * count, GREEDY, policy=policy, seeds=range(count))
    return torch.tensor(result.accepted)


def test_synthetic_rates_are_reached() -> None:
    """Each conditional rate of 6000 windows is within four standard errors; a second run is equal."""
    rates = (0.9, 0.6, 0.3, 0.5)
    num = synthetic({"synthetic_acceptance_rates": rates})
    for place, rate in enumerate(rates):
        reached, accepted_count = int((num >= place).sum()), int((num > place).sum())
        assert abs(accepted_count / reached - rate) < 4 * (rate * (1 - rate) / reached) ** 0.5
    assert torch.equal(num, synthetic({"synthetic_acceptance_rates": rates}))


@pytest.mark.parametrize("length", (1.0, 1.7, 3.0, 4.9, 5.0))
def test_synthetic_length_is_reached(length: float) -> None:
    num = synthetic({"synthetic_acceptance_length": length})
    assert abs(float((num + 1).float().mean()) - length) < 0.1


def test_synthetic_rates_0_and_1_are_exact_and_end_tokens_finish() -> None:
    assert set(synthetic({"synthetic_acceptance_rates": (1, 1, 0, 1)}, 500).tolist()) == {2}
    logits = ranked([3], [8], [2], gap=40)
    policy = {"accept_policy": "synthetic", "synthetic_acceptance_rates": (1.0, 1.0)}
    assert decide(logits, [[9, 7]], GREEDY, policy=policy, eos=(9,)).tokens == [[9]]


def test_synthetic_length_is_reached_in_the_engine() -> None:
    spec = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    spec |= {"accept_policy": "synthetic", "synthetic_acceptance_length": 2.5}
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    runs = [run(engine(speculative=spec), [request(i, params) for i in range(8)]) for _ in range(2)]
    steps = [s for r in runs[0].values() for s in r.steps if s.num_draft == 3]
    mean = sum(s.num_accepted + 1 for s in steps) / len(steps)
    assert len(steps) > 200 and abs(mean - 2.5) < 0.25
    assert [r.token_ids for r in runs[0].values()] == [r.token_ids for r in runs[1].values()]


@pytest.mark.parametrize(
    "bad",
    (
        {"accept_policy": "acept_all"},
        {"accept_policy": "synthetic"},
        {"accept_policy": "synthetic", "synthetic_acceptance_length": 9},
        {"accept_policy": "synthetic", "synthetic_acceptance_rates": (0.5,)},
        {"accept_policy": "normal", "synthetic_acceptance_length": 2},
    ),
    ids=str,
)
def test_invalid_policies_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 4, **bad})


ALL_ACCEPTED = {"accept_policy": "accept_all"}
AT_RATES = {"accept_policy": "synthetic", "synthetic_acceptance_length": 2.0}


@pytest.mark.parametrize("policy", (ALL_ACCEPTED, AT_RATES), ids=lambda p: p["accept_policy"])
@pytest.mark.parametrize("greedy", (True, False))
def test_policy_that_commits_unverified_drafts_is_labelled_lossy(
    policy: dict[str, Any], greedy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(speculative={"method": "ngram", "num_speculative_tokens": 3, **policy})
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and policy["accept_policy"] in warnings[0] and "LOSSY" in warnings[0]
    temperature = 0.0 if greedy else 1.0
    label, lossless = made.strategy_label(SamplingParams(temperature=temperature))
    assert not lossless and "LOSSY" in label and policy["accept_policy"] in label
    assert "not seed-exact" in label and "LOSSY" in made.describe()
    guarantee = made.guarantees.by_name[made.guarantees.default].under_policy(policy["accept_policy"])
    assert not guarantee.lossless and not guarantee.lossless_greedy and not guarantee.seed_exact
    # a request without drafts is verified by the strategy alone
    label, lossless = made.strategy_label(SamplingParams(speculative=False))
    assert lossless and label == "target_match: lossless and seed-exact"


@pytest.mark.parametrize("policy", ("normal", "reject_all"))
def test_policy_that_commits_verified_tokens_keeps_the_label(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(speculative={"method": "ngram", "num_speculative_tokens": 3, "accept_policy": policy})
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert made.strategy_label(SamplingParams()) == ("target_match: lossless and seed-exact", True)


# --- mixed strategies ---


def test_mixed_strategies_equal_each_alone() -> None:
    counts = [i % 4 for i in range(60)]
    logits = noise(sum(counts) + 60, scale=2.0)
    best = logits.argmax(-1)
    made = [strategy(name) for name in STRATEGIES]
    row_strategies = [made[i // 2 % len(made)] for i in range(60)]
    params = [SAMPLED if i % 3 else GREEDY for i in range(60)]
    starts = [sum(counts[:i]) + i for i in range(60)]
    drafts = [best[s : s + c].tolist() for s, c in zip(starts, counts, strict=True)]
    probs = torch.softmax(noise(180, seed=4), -1).view(60, 3, V)
    together = decide(logits, drafts, params, row_strategies, probs=probs, seeds=range(60))
    for i in range(60):
        rows = logits[starts[i] : starts[i] + counts[i] + 1]
        mine = probs[i : i + 1, : max(counts[i], 1)]
        alone = decide(rows, [drafts[i]], params[i], row_strategies[i], probs=mine, seeds=[i])
        assert together.tokens[i] == alone.tokens[0], f"window {i} of {type(row_strategies[i]).__name__}"
    assert len({tuple(t) for t in together.tokens}) > 30


def test_mixed_strategies_in_the_engine_equal_each_alone() -> None:
    base = {"method": "ngram", "num_speculative_tokens": 3}

    def request_with(i: int, name: str | None) -> Any:
        wanted = {"verify_strategy": name} if name else None
        return request(i, SamplingParams(temperature=0.8, max_tokens=24, speculative=wanted))

    names = list(STRATEGIES)
    mixed = run(engine(speculative=base), [request_with(i, names[i]) for i in range(len(names))])
    for i, name in enumerate(names):
        alone = run(engine(speculative={**base, "verify_strategy": name}), [request_with(i, None)])
        assert mixed[str(i)].same() == alone[str(i)].same(), name


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_request_without_speculation_ignores_the_strategy(name: str) -> None:
    hot = {"temperature": 1.3, "max_tokens": 20, "logprobs": 3}
    spec = {"method": "ngram", "verify_strategy": name, "num_speculative_tokens": 3}
    off = request(1, SamplingParams(**hot, speculative=False))
    got = run(engine(speculative=spec), [off])["1"]
    assert got.same() == run(engine(), [request(1, SamplingParams(**hot))])["1"].same()


def test_control_strategies_differ() -> None:
    logits, drafts = noise(400, scale=2.0), [[i % V] * 3 for i in range(100)]
    results = {name: decide(logits, drafts, SAMPLED, name).tokens for name in STRATEGIES}
    for a in results:
        assert all(results[a] != results[b] for b in results if b != a)


@every
def test_memory_past_the_last_draft_is_never_read(name: str) -> None:
    logits = noise(5)
    results = []
    for poison in (-(2**40), -1, 0, V, 2**40):
        slots = filled_slots([request(i, SAMPLED, 3) for i in range(2)], 4, V)
        slots.columns.draft.fill_(poison)
        slots.columns.draft[0, :2], slots.columns.draft[1, :1] = torch.tensor([3, 4]), 5
        slots.columns.num_draft.copy_(torch.tensor([2, 1]))
        result = run_step(slots, logits, [strategy(name)])
        results.append((result.tokens, result.accepted, result.outcome.table.tolist()))
    assert all(each == results[0] for each in results)


@every
def test_padding_rows_change_nothing(name: str) -> None:
    logits = noise(7)
    drafts = [[3, 4], [], [5]]
    plain = decide(logits[:6], drafts, SAMPLED, name)
    for value in (0.0, torch.nan, torch.inf, -torch.inf):
        padded = decide(torch.cat([logits[:6], torch.full((3, V), value)]), drafts, SAMPLED, name)
        assert padded.tokens == plain.tokens and padded.ended == plain.ended
        assert padded.outcome.table.tolist() == plain.outcome.table.tolist()
