"""Filters and penalties against the logits processors of transformers.

Each request is a window of two drafts, so that rows after the first check that drafts count as committed.
transformers gets the fp32 logits in fp64, after its own temperature.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftproof.sampling_params import SamplingParams
from scripted import decide

VOCAB, WINDOWS = 503, 40
PROMPT = [3, 9, 9, 27, 81, 243, 3, 100, 200, 300]

SINGLE = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 600},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"temperature": 0.3},
    {"temperature": 2.5},
]
MIXED = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m, "repetition_penalty": r}
    for t, k, p, m, r in itertools.product((0.7, 1.4), (0, 20), (1.0, 0.8), (0.0, 0.02), (1.0, 1.2))
]


def rows(seed: int) -> tuple[Tensor, list[list[int]]]:
    random = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn((3 * WINDOWS, VOCAB), generator=random)
    logits[::7] *= 0.05  # nearly flat
    drafts = torch.randint(0, VOCAB, (WINDOWS, 2), generator=random).tolist()
    return logits, drafts


def contexts(drafts: list[list[int]]) -> list[list[int]]:
    return [PROMPT + draft[:depth] for draft in drafts for depth in range(3)]


def theirs(logits: Tensor, context: list[int], params: SamplingParams) -> Tensor:
    """Return fp64 probabilities [VOCAB] in the order of transformers."""
    ids, scores = torch.tensor([context]), logits[None]
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores).double()
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0].softmax(-1)


def ours(logits: Tensor, drafts: list[list[int]], params: SamplingParams) -> Tensor:
    params = replace(params, logprobs=0, logprobs_mode="processed")  # applies the temperature
    processed = decide(logits, drafts, params, prompt=PROMPT).sampled.processed
    return processed.double().softmax(-1)


@pytest.mark.parametrize("options", SINGLE + MIXED, ids=str)
def test_filters_equal_transformers(options: dict[str, float]) -> None:
    """Supports are equal and probabilities within 1e-5: 120 rows for each of 45 settings."""
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 8, **options})
    logits, drafts = rows(seed=len(str(options)))
    got = ours(logits, drafts, params)
    for row, context in enumerate(contexts(drafts)):
        want = theirs(logits[row], context, params)
        assert torch.equal(got[row] > 0, want > 0), "support"
        assert float((got[row] - want).abs().max()) < 1e-5


def plain_loop(logits: Tensor, context: list[int], params: SamplingParams) -> Tensor:
    """Apply repetition over all tokens, presence and frequency over the output, as vLLM documents them."""
    out = logits.tolist()
    for token in set(context):
        factor = params.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    generated = context[len(PROMPT) :]
    for token in set(generated):
        out[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    return torch.tensor(out)


@pytest.mark.parametrize(
    "options",
    (
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7, "presence_penalty": 0.2},
        {"frequency_penalty": 0.3, "presence_penalty": 0.4, "repetition_penalty": 1.7},
    ),
    ids=str,
)
def test_penalties_equal_a_plain_loop(options: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 8, **options})
    logits, drafts = rows(seed=3)
    drafts = [[d[0], d[0]] if i % 3 == 0 else [3, d[1]] for i, d in enumerate(drafts)]  # repeats
    got = decide(logits, drafts, params, prompt=PROMPT).sampled.processed
    for row, context in enumerate(contexts(drafts)):
        torch.testing.assert_close(got[row], plain_loop(logits[row], context, params), rtol=1e-6, atol=1e-5)


def test_control_penalties_that_ignore_drafts_are_detected() -> None:
    """Give transformers the prompt without the drafts."""
    params = SamplingParams(temperature=1.0, max_tokens=8, repetition_penalty=1.3)
    logits, drafts = rows(seed=3)
    got = ours(logits, drafts, params)
    errors = [float((got[r] - theirs(logits[r], PROMPT, params)).abs().max()) for r in range(3 * WINDOWS)]
    assert max(errors[::3]) < 1e-5 < max(errors[1::3])


def test_control_top_p_before_top_k_is_detected() -> None:
    logits, drafts = rows(seed=4)
    got = ours(logits, drafts, SamplingParams(max_tokens=8, top_k=20, top_p=0.8))
    differ = 0
    for row in range(3 * WINDOWS):
        scores = TopPLogitsWarper(0.8)(torch.tensor([[0]]), logits[row][None].double())
        want = TopKLogitsWarper(20)(torch.tensor([[0]]), scores)[0].softmax(-1)
        differ += not torch.equal(got[row] > 0, want > 0)
    assert differ > 10
