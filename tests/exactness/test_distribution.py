"""Chi-square tests of the distribution of outputs, with the real noise and sampled drafts.

COUNT requests are sampled; each test has level ALPHA. If any 3 points of probability are moved, the
noncentrality is at least COUNT * 0.03^2 / (1/2 * 1/2). The first test shows that such a bias is detected with
probability over 0.99, for the 4 outcomes of one token and the 64 of three. Seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from distribution import (
    ALLOWED,
    ALPHA,
    BIAS,
    COUNT,
    DRAFT_LOGITS,
    LENGTH,
    PARAMS,
    TARGET,
    K,
    V,
    biased,
    engine_distribution,
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
    """Return a drafter that samples from its own distribution, by default with the noise of the target."""

    def draft(last: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        logits = DRAFT_LOGITS[last]
        return OPS.sampling.gumbel_argmax(logits, seeds, positions, stream), logits.softmax(-1)

    return draft


def certain_drafts(last: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely token, as n-gram drafts are certain."""
    token = DRAFT_LOGITS[last].argmax(-1)
    return token, torch.nn.functional.one_hot(token, V).float()


def test_bias_of_3_percent_has_a_power_over_99_percent() -> None:
    noncentrality = COUNT * BIAS**2 * 4
    for outcomes in (V, V**LENGTH):
        critical = stats.chi2.isf(ALPHA, outcomes - 1)
        assert stats.ncx2.sf(critical, outcomes - 1, noncentrality) > 0.99


# --- strategies ---

DRAFTERS: dict[str, Drafter | None] = {
    "shared_noise": sampled_drafts(),
    "own_noise": sampled_drafts(stream=STREAM_SYNTHETIC),
    "certain": certain_drafts,
    "none": None,
}


def simulated(name: str, params: str, drafter: Drafter | None = DRAFTERS["shared_noise"], **more: Any) -> Any:
    """Return the p-values of simulated requests."""
    tokens = simulate(TARGET, PARAMS[params], strategy(name), drafter, count=COUNT, k=K, **more)
    return p_values(tokens, PARAMS[params])


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("params", PARAMS)
def test_lossless_strategy_keeps_the_distribution(name: str, params: str) -> None:
    values = simulated(name, params)
    assert not biased(values), values


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("drafter", ("own_noise", "certain", "none"))
def test_lossless_strategy_keeps_the_distribution_with_any_drafter(name: str, drafter: str) -> None:
    values = simulated(name, "mixed", DRAFTERS[drafter], seed=1)
    assert not biased(values), values


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("params", ["plain", "top_p"])
def test_lossy_strategy_is_biased(name: str, params: str) -> None:
    assert biased(simulated(name, params))


def test_topp_without_drafts_is_unbiased() -> None:
    assert not biased(simulated("topp", "top_p", None))


def test_target_match_commits_the_tokens_of_plain_decoding() -> None:
    for params in PARAMS.values():
        plain = simulate(TARGET, params, strategy("target_match"), None, count=2000, k=K)
        for drafter in DRAFTERS.values():
            assert torch.equal(
                simulate(TARGET, params, strategy("target_match"), drafter, count=2000, k=K), plain
            )


# --- negative controls ---


def replace_in_3_percent(token: int) -> Callable[[Choice, Windows], Choice]:
    def wrong(choice: Choice, windows: Windows) -> Choice:
        seeds = windows.columns.seed[windows.slot]
        spoilt = (seeds * 7919) % 100 < 100 * BIAS
        accepted = windows.draft == choice.token if choice.accept is None else choice.accept
        recovered = choice.token if choice.recovered is None else choice.recovered
        return replace(
            choice,
            token=torch.where(spoilt, token, choice.token),
            accept=torch.where(spoilt, windows.draft == token, accepted),
            recovered=torch.where(spoilt, token, recovered),
        )

    return wrong


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("token", range(V))
def test_control_bias_of_3_percent_is_detected(name: str, token: int) -> None:
    assert biased(simulated(name, "plain", wrong=replace_in_3_percent(token)))


@pytest.mark.parametrize("shared", ("STREAM_RESIDUAL", "STREAM_ACCEPT"))
def test_control_reused_noise_is_detected(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the replacement or the acceptance from the noise of the draft."""
    monkeypatch.setattr(f"draftproof.verify.rejection.{shared}", STREAM_SAMPLE)
    assert biased(simulated("rejection", "plain"))


def test_control_wrong_draft_probs_are_detected() -> None:

    def wrong_probs(last: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        token, probs = sampled_drafts()(last, seeds, positions)
        return token, torch.full_like(probs, 1 / V)

    assert biased(simulated("rejection", "plain", wrong_probs))


# --- the whole engine ---

REQUESTS = 18_000


class SampledProposer(Proposer):
    """Proposer that samples from a fixed distribution with the noise of the target."""

    sources = ("sampled",)
    reports_probs = True

    def propose(self, batch: ProposeBatch) -> Draft:
        b, k, vocab = len(batch.slots), self.env.k, self.env.vocab_size
        logits = torch.full((vocab,), -torch.inf)
        logits[list(ALLOWED)] = torch.tensor([1.0, 0.0, -1.0, 0.5, 0.2])
        logits[8] = 0.0  # not allowed to the target
        out = torch.tensor(batch.lengths) - batch.columns.prompt_len[batch.slots]
        seeds = batch.columns.seed[batch.slots].repeat_interleave(k)
        positions = (out[:, None] + torch.arange(k)).reshape(-1)
        tokens = self.env.ops.sampling.gumbel_argmax(
            logits.expand(b * k, vocab), seeds, positions, STREAM_SAMPLE
        )
        tokens, probs = tokens.view(b, k), logits.softmax(-1).expand(b, k, vocab)
        logprobs = probs.gather(2, tokens[..., None])[..., 0].log()
        return Draft(tokens, torch.full((b,), k), logprobs, probs)


def spec_of(proposer: str, strategy_name: str) -> dict[str, Any]:
    method = {"method": f"test_distribution:{proposer}", "num_speculative_tokens": 2, "adaptive": False}
    return {**method, "verify_strategy": strategy_name}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_engine_samples_the_distribution_with_lossless_strategies_only(name: str) -> None:
    """Serve one prompt with 18000 seeds and two sampled drafts a step.

    With 25 outcomes a bias of 3 points is detected with probability over 0.99. Lossy strategies need fewer,
    as does target_match, whose tokens are those without drafts (`test_exact`).
    """
    assert stats.ncx2.sf(stats.chi2.isf(ALPHA, 24), 24, REQUESTS * BIAS**2 * 4) > 0.99
    count = REQUESTS if name in LOSSLESS and name != "target_match" else 4000
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 4096}
    target = engine(speculative=spec_of("SampledProposer", name), debug=False, **sizes)
    params = SamplingParams(max_tokens=3, temperature=2.0, allowed_token_ids=ALLOWED)
    records = run(target, [request(i, params, prompt_token_ids=prompt(0)) for i in range(count)])
    # The first token is sampled with the prompt and has no draft; the second is the first of a window.
    samples = [tuple(r.token_ids[:2]) for r in records.values()]
    assert all(set(r.token_ids) <= set(ALLOWED) for r in records.values())
    assert sum(s.num_accepted for r in records.values() for s in r.steps) > count // 40
    value = p_value(samples, engine_distribution(params))
    assert (value >= ALPHA) == (name in LOSSLESS), value


class Alternating(SampledProposer):
    """Proposer that samples in every second step and is certain in the others."""

    reports_one_hot = False

    def propose(self, batch: ProposeBatch) -> Draft:
        draft = super().propose(batch)
        if max(batch.lengths) % 2:
            return draft
        assert draft.probs is not None
        one_hot = torch.nn.functional.one_hot(draft.tokens, self.env.vocab_size).float()
        return Draft(draft.tokens, draft.count, None, one_hot if self.reports_one_hot else None)


class AlternatingReported(Alternating):
    reports_one_hot = True


def test_draft_without_probs_is_certain_after_a_sampled_one() -> None:
    answers = []
    for name in ("Alternating", "AlternatingReported"):
        target = engine(speculative=spec_of(name, "rejection"))
        params = SamplingParams(max_tokens=40, temperature=2.0, allowed_token_ids=ALLOWED)
        # One at a time, so that the parity of its length decides.
        answers.append([run(target, [request(i, params)])[str(i)].token_ids for i in range(4)])
    assert answers[0] == answers[1]
