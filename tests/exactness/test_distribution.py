"""Is the law of the output the model's? Chi-square tests with the real noise and really sampled drafts.

Power. COUNT requests are sampled, each test has level ALPHA. Whatever way 3 points of probability are
moved (in the worst case between two halves of the outcomes), the noncentrality is at least
COUNT * 0.03^2 / (1/2 * 1/2), and `test_power` shows that such a bias is caught with probability over
0.99, for the 4 outcomes of one token and for the 64 of three tokens together. Seeds are fixed: a test that
passes today passes tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from distribution import (
    ALLOWED,
    ALPHA,
    BIAS,
    COUNT,
    GUESS,
    LENGTH,
    PARAMS,
    TARGET,
    K,
    V,
    biased,
    engine_law,
    p_value,
    p_values,
)
from draftproof.ops import STREAM_SAMPLE, STREAM_SYNTHETIC
from draftproof.propose import Proposer
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.types import Choice, Draft, ProposeBatch, Windows
from draftproof.verify import STRATEGIES
from scripted import OPS, Drafter, simulate, strategy
from tiny import engine, prompt, request, run

LOSSLESS = [name for name in STRATEGIES if lookup(STRATEGIES, name, "").lossless]
LOSSY = [name for name in STRATEGIES if name not in LOSSLESS]


def sampled_drafts(stream: int = STREAM_SAMPLE) -> Drafter:
    """Drafts as a draft model samples them: its own law, by default the target's noise."""

    def draft(last: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        logits = GUESS[last]
        return OPS.sampling.gumbel_argmax(logits, seeds, positions, stream), logits.softmax(-1)

    return draft


def certain_drafts(last: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As n-grams are: always the same guess."""
    token = GUESS[last].argmax(-1)
    return token, torch.nn.functional.one_hot(token, V).float()


def test_power() -> None:
    noncentrality = COUNT * BIAS**2 * 4
    for outcomes in (V, V**LENGTH):
        critical = stats.chi2.isf(ALPHA, outcomes - 1)
        assert stats.ncx2.sf(critical, outcomes - 1, noncentrality) > 0.99


# --- what is lossless passes, what is not fails ---

DRAFTERS: dict[str, Drafter | None] = {
    "shared_noise": sampled_drafts(),
    "own_noise": sampled_drafts(stream=STREAM_SYNTHETIC),
    "certain": certain_drafts,
    "none": None,
}


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_lossless(name: str, params: SamplingParams) -> None:
    tokens = simulate(TARGET, params, strategy(name), sampled_drafts(), count=COUNT, k=K)
    assert not biased(p_values(tokens, params)), p_values(tokens, params)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("drafter", ("own_noise", "certain", "none"))
def test_lossless_whoever_drafts(name: str, drafter: str) -> None:
    params = PARAMS["mixed"]
    tokens = simulate(TARGET, params, strategy(name), DRAFTERS[drafter], count=COUNT, k=K, seed=1)
    assert not biased(p_values(tokens, params)), p_values(tokens, params)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("params", [PARAMS["plain"], PARAMS["top_p"]], ids=("plain", "top_p"))
def test_lossy_fails_the_same_test(name: str, params: SamplingParams) -> None:
    """`topp` in every setting; `greedy` because the temperature is above 0: their labels say so."""
    tokens = simulate(TARGET, params, strategy(name), sampled_drafts(), count=COUNT, k=K)
    assert biased(p_values(tokens, params))


def test_topp_is_biased_by_its_drafts_alone() -> None:
    """Without drafts and with room for every candidate it samples from the nucleus as anyone does."""
    params = PARAMS["top_p"]
    tokens = simulate(TARGET, params, strategy("topp"), None, count=COUNT, k=K)
    assert not biased(p_values(tokens, params))


def test_target_match_takes_the_plain_tokens() -> None:
    """Not only the law: the very tokens."""
    for params in PARAMS.values():
        plain = simulate(TARGET, params, strategy("target_match"), None, count=2000, k=K)
        for drafter in DRAFTERS.values():
            assert torch.equal(
                simulate(TARGET, params, strategy("target_match"), drafter, count=2000, k=K), plain
            )


def test_shared_noise_is_accepted_more_often() -> None:
    """Why a drafter uses the target's noise: the first drafts that stand, with it and without."""
    plain = simulate(TARGET, PARAMS["plain"], strategy("target_match"), None, count=4000, k=K)
    last, seeds = torch.zeros(4000, dtype=torch.int64), torch.arange(4000)
    rates = [
        float((DRAFTERS[name](last, seeds, torch.zeros_like(seeds))[0] == plain[:, 0]).float().mean())  # type: ignore[misc]
        for name in ("shared_noise", "own_noise")
    ]
    assert rates[0] > rates[1] + 0.1


# --- negative controls ---


def replace_in_3_percent(token: int) -> Callable[[Choice, Windows], Choice]:
    def wrong(choice: Choice, windows: Windows) -> Choice:
        seeds = windows.columns.seed[windows.slot]
        spoilt = (seeds * 7919) % 100 < 100 * BIAS
        stands = windows.draft == choice.token if choice.accept is None else choice.accept
        fallen = choice.token if choice.recovered is None else choice.recovered
        return replace(
            choice,
            token=torch.where(spoilt, token, choice.token),
            accept=torch.where(spoilt, windows.draft == token, stands),
            recovered=torch.where(spoilt, token, fallen),
        )

    return wrong


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("token", range(V))
def test_control_a_bias_of_3_percent_is_caught(name: str, token: int) -> None:
    """3 requests of 100 get this token instead of what was decided."""
    params = PARAMS["plain"]
    tokens = simulate(
        TARGET,
        params,
        strategy(name),
        sampled_drafts(),
        count=COUNT,
        k=K,
        wrong=replace_in_3_percent(token),
    )
    assert biased(p_values(tokens, params))


@pytest.mark.parametrize("shared", ("STREAM_RESIDUAL", "STREAM_ACCEPT"))
def test_control_reused_noise_is_caught(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacement, or the decision to keep, drawn from the noise that drew the draft."""
    monkeypatch.setattr(f"draftproof.verify.rejection.{shared}", STREAM_SAMPLE)
    params = PARAMS["plain"]
    tokens = simulate(TARGET, params, strategy("rejection"), sampled_drafts(), count=COUNT, k=K)
    assert biased(p_values(tokens, params))


def test_control_a_draft_law_that_is_not_the_drafts_is_caught() -> None:
    """A drafter that says it guessed blindly although it did not."""

    def lying(last: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        token, probs = sampled_drafts()(last, seeds, positions)
        return token, torch.full_like(probs, 1 / V)

    params = PARAMS["plain"]
    tokens = simulate(TARGET, params, strategy("rejection"), lying, count=COUNT, k=K)
    assert biased(p_values(tokens, params))


# --- the whole engine ---

REQUESTS = 20_000


class SampledProposer(Proposer):
    """Samples its drafts with the target's noise from a fixed law of its own, half of it not allowed."""

    sources = ("sampled",)
    reports_probs = True

    def propose(self, batch: ProposeBatch) -> Draft:
        b, k, vocab = len(batch.slots), self.env.k, self.env.vocab_size
        logits = torch.full((vocab,), -torch.inf)
        logits[list(ALLOWED)] = torch.tensor([1.0, 0.0, -1.0, 0.5, 0.2])
        logits[8] = 0.0  # the target never takes this one
        out = torch.tensor(batch.lengths) - batch.columns.prompt_len[batch.slots]
        seeds = batch.columns.seed[batch.slots].repeat_interleave(k)
        positions = (out[:, None] + torch.arange(k)).reshape(-1)
        tokens = self.env.ops.sampling.gumbel_argmax(
            logits.expand(b * k, vocab), seeds, positions, STREAM_SAMPLE
        )
        tokens, probs = tokens.view(b, k), logits.softmax(-1).expand(b, k, vocab)
        logprobs = probs.gather(2, tokens[..., None])[..., 0].log()
        return Draft(tokens, torch.full((b,), k), logprobs, probs)


@pytest.mark.parametrize("name", STRATEGIES)
def test_engine(name: str) -> None:
    """One prompt, 20000 seeds, through the engine, 256 at a time, with two sampled drafts a step.

    25 outcomes: a bias of 3 points is caught with probability over 0.99. What is lossy needs fewer.
    """
    assert stats.ncx2.sf(stats.chi2.isf(ALPHA, 24), 24, REQUESTS * BIAS**2 * 4) > 0.99
    count = REQUESTS if name in LOSSLESS else 4000
    target = engine(
        speculative={
            "method": "test_distribution:SampledProposer",
            "num_speculative_tokens": 2,
            "verify_strategy": name,
            "adaptive": False,
        },
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        debug=False,
    )
    params = SamplingParams(max_tokens=3, temperature=2.0, allowed_token_ids=ALLOWED)
    records = run(target, [request(i, params, prompt_token_ids=prompt(0)) for i in range(count)])
    # the first token comes with the prompt and has no draft; the second is the first of a window
    samples = [tuple(r.token_ids[:2]) for r in records.values()]
    assert all(set(r.token_ids) <= set(ALLOWED) for r in records.values())
    assert sum(s.num_accepted for r in records.values() for s in r.steps) > count // 40
    value = p_value(samples, engine_law(params))
    assert (value >= ALPHA) == (name in LOSSLESS), value


class Alternating(SampledProposer):
    """Samples in one step and is certain in the next; `says_so` spells the certain law out."""

    says_so = False

    def propose(self, batch: ProposeBatch) -> Draft:
        draft = super().propose(batch)
        if max(batch.lengths) % 2:
            return draft
        assert draft.probs is not None
        law = torch.nn.functional.one_hot(draft.tokens, self.env.vocab_size).float()
        return Draft(draft.tokens, draft.count, None, law if self.says_so else None)


class AlternatingAloud(Alternating):
    says_so = True


def test_a_certain_draft_after_a_sampled_one_is_not_judged_by_its_law() -> None:
    """Draft.probs=None means certain, whatever the slot's last draft reported."""
    answers = []
    for name in ("Alternating", "AlternatingAloud"):
        target = engine(
            speculative={
                "method": f"test_distribution:{name}",
                "num_speculative_tokens": 2,
                "verify_strategy": "rejection",
                "adaptive": False,
            }
        )
        params = SamplingParams(max_tokens=40, temperature=2.0, allowed_token_ids=ALLOWED)
        # one at a time, so that the parity of its length decides
        answers.append([run(target, [request(i, params)])[str(i)].token_ids for i in range(4)])
    assert answers[0] == answers[1]
