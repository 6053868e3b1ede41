"""Chi-square tests of sampled tokens against the exact distribution of a Markov chain or an engine."""

from __future__ import annotations

import itertools

import torch
from scipy import stats
from torch import Tensor

from draftproof.sampling_params import SamplingParams
from tiny import engine, prompt, request, run

COUNT, ALPHA, BIAS = 25_000, 1e-3, 0.03

V, LENGTH, K = 4, 3, 2

PARAMS = {
    "plain": SamplingParams(max_tokens=LENGTH),
    "cool": SamplingParams(max_tokens=LENGTH, temperature=0.6),
    "hot": SamplingParams(max_tokens=LENGTH, temperature=1.6),
    "top_k": SamplingParams(max_tokens=LENGTH, top_k=3),
    "top_p": SamplingParams(max_tokens=LENGTH, top_p=0.85),
    "mixed": SamplingParams(max_tokens=LENGTH, temperature=1.3, top_k=3, top_p=0.9),
}

_random = torch.Generator().manual_seed(11)

TARGET = 0.9 * torch.randn((V, V), generator=_random)

DRAFT_LOGITS = TARGET + 0.9 * torch.randn((V, V), generator=_random)  # logits of the drafter


def sequence_probs(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Return the probability of every sequence after token 0, computed directly."""
    rows = []
    for row in TARGET.tolist():
        weights = {i: 2.718281828459045 ** (x / params.temperature) for i, x in enumerate(row)}
        order = sorted(weights, key=lambda i: -weights[i])
        order = order[: params.top_k or V]
        total, before, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            if before < params.top_p * total:
                kept.append(i)
            before += weights[i]
        rows.append([weights[i] / sum(weights[j] for j in kept) if i in kept else 0.0 for i in range(V)])
    out = {}
    for tokens in itertools.product(range(V), repeat=LENGTH):
        p = 1.0
        for last, token in zip((0, *tokens), tokens, strict=False):
            p *= rows[last][token]
        out[tokens] = p
    return out


def p_value(samples: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of Pearson's test, pooling outcomes expected fewer than 10 times."""
    counts = dict.fromkeys(expected, 0)
    for sample in samples:
        if expected.get(sample, 0.0) == 0.0:
            return 0.0
        counts[sample] += 1
    n = len(samples)
    cells = [(counts[s], n * p) for s, p in expected.items() if n * p >= 10]
    rest = [(counts[s], n * p) for s, p in expected.items() if 0 < n * p < 10]
    if rest:
        cells.append((sum(c for c, _ in rest), sum(e for _, e in rest)))
    if len(cells) == 1:
        return 1.0
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    return float(stats.chi2.sf(statistic, len(cells) - 1))


def p_values(tokens: Tensor, params: SamplingParams) -> dict[str, float]:
    """Return p-values of the three tokens together and of each place alone."""
    joint = sequence_probs(params)
    rows = [tuple(line) for line in tokens.tolist()]
    out = {"joint": p_value(rows, joint)}
    for place in range(LENGTH):
        marginal: dict[tuple[int, ...], float] = {}
        for sequence, p in joint.items():
            marginal[(sequence[place],)] = marginal.get((sequence[place],), 0.0) + p
        out[f"token {place}"] = p_value([(row[place],) for row in rows], marginal)
    return out


def biased(values: dict[str, float]) -> bool:
    return min(values.values()) < ALPHA


ALLOWED = (5, 17, 40, 63, 90)


def engine_distribution(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Return probabilities of the first two tokens among ALLOWED, from the engine's own logprobs."""
    target = engine(max_logprobs=-1)
    base = prompt(0)

    def row(ids: list[int]) -> dict[int, float]:
        params_all = SamplingParams(max_tokens=1, logprobs=-1)
        line = run(target, [request(0, params_all, prompt_token_ids=ids)])["0"].logprobs[0]
        values = dict(zip(line.token_ids, line.logprobs, strict=True))
        weights = {i: 2.718281828459045 ** (values[i] / params.temperature) for i in ALLOWED}
        return {i: w / sum(weights.values()) for i, w in weights.items()}

    first = row(base)
    return {(a, b): p * q for a, p in first.items() for b, q in row([*base, a]).items()}
