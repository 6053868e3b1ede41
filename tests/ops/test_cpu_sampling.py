"""Sampling ops of the cpu backend: noise, order and truncation against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from cpu_cases import CPU, rand, same
from draftproof.ops.cpu.backend import CpuOps


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(CPU, threads=2)


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Return the words of Philox-4x32-10 in Python integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        low = 0xFFFFFFFF
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & low, (p0 >> 32) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c


KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_cpu_philox_known_answers() -> None:
    from draftproof.ops.cpu.sampling.philox import philox as native

    for counter, key, words in KNOWN:
        assert tuple(philox(counter, key)) == words
        assert tuple(native(*counter, *key)) == words


def noise(seed: int, position: int, stream: int, vocab: int) -> np.ndarray:
    """Return the uniform draw of every id."""
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    words = [philox((i, position & 0xFFFFFFFF, stream, 0), key) for i in range(-(-vocab // 4))]
    return (np.array(words, dtype=np.float64).reshape(-1)[:vocab] + 0.5) * 2.0**-32


def test_uniform(ops: CpuOps) -> None:
    seeds = torch.tensor([0, -1, 2**62 + 12345, 7])
    positions = torch.tensor([0, 5, 1000000, 2**31])
    expected = [noise(int(s), int(p), 1, 1)[0] for s, p in zip(seeds, positions, strict=True)]
    assert ops.sampling.uniform(seeds, positions, 1).tolist() == expected


@pytest.mark.parametrize("vocab", [1, 3, 16, 97, 259, 1000, 5003])
def test_gumbel_argmax_equals_brute_force(ops: CpuOps, vocab: int) -> None:
    scales = [0.0, 0.5, 3.0, 10.0, 1e5]
    rows = []
    for i, scale in enumerate(scales):
        rows.append(rand(vocab, seed=i) * scale)
    rows.append(torch.full((vocab,), float("-inf")))
    rows.append(rand(vocab, seed=9) * 2)
    rows[-1][rand(vocab, seed=8) > 0] = float("-inf")
    scaled = torch.stack(rows * 3)
    seeds = torch.arange(len(scaled)) * 2**33 - 5
    positions = torch.arange(len(scaled)) * 17
    got = ops.sampling.gumbel_argmax(scaled, seeds, positions, 2)
    for i, row in enumerate(scaled):
        u = noise(int(seeds[i]), int(positions[i]), 2, vocab)
        g = (-np.log(-np.log1p(-u))).astype(np.float32)
        assert int(got[i]) == int(np.argmax(row.numpy() + g)), i
        one = slice(i, i + 1)
        assert same(ops.sampling.gumbel_argmax(scaled[one], seeds[one], positions[one], 2), got[one])


def awkward(vocab: int) -> Tensor:
    """Rows with ties, -inf, one value only, signed zeros, everything but one -inf."""
    ties = torch.randint(-3, 4, (vocab,), generator=torch.Generator().manual_seed(1)).float()
    zeros = torch.zeros(vocab)
    zeros[::2] = -0.0
    holes = rand(vocab, seed=2) * 3
    holes[rand(vocab, seed=3) > 0] = float("-inf")
    lone = torch.full((vocab,), float("-inf"))
    lone[vocab // 2] = -5.0
    nothing = torch.full((vocab,), float("-inf"))
    return torch.stack([rand(vocab) * 4, ties, zeros, holes, lone, nothing, rand(vocab) * 30])


def order(row: Tensor) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))


@pytest.mark.parametrize("vocab", [1, 15, 97, 259, 1024])
def test_argmax_rank_top(ops: CpuOps, vocab: int) -> None:
    logits = awkward(vocab)
    orders = [order(row) for row in logits]
    assert ops.sampling.argmax(logits).tolist() == [ids[0] for ids in orders]
    for k in {1, min(5, vocab), vocab // 2, vocab}:
        if k:
            values, ids = ops.sampling.top(logits, k)
            assert ids.tolist() == [line[:k] for line in orders]
            assert same(values, logits.gather(1, ids))
    for place in {0, vocab // 3, vocab - 1}:
        ids = torch.tensor([line[place] for line in orders])
        assert ops.sampling.rank(logits, ids).tolist() == [place + 1] * len(logits)
    for i in range(len(logits)):
        assert ops.sampling.argmax(logits[i : i + 1]).tolist() == [orders[i][0]]
    assert ops.sampling.top(logits, 0)[0].shape == (len(logits), 0)


@pytest.mark.parametrize("vocab", [1, 97, 5003])
def test_logsumexp(ops: CpuOps, vocab: int) -> None:
    logits = awkward(vocab)
    got = ops.sampling.logsumexp(logits)
    torch.testing.assert_close(got, logits.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-6)
    for i in range(len(logits)):
        assert same(ops.sampling.logsumexp(logits[i : i + 1]), got[i : i + 1])
    assert ops.sampling.logsumexp(torch.tensor([[float("inf"), 0.0]])).tolist() == [float("inf")]


def truncated(row: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    ids = order(row)
    kept = ids[:top_k] if top_k else ids
    probs = row.double()[kept].softmax(0) if row.max() > float("-inf") else row.double()[kept]
    out = torch.full_like(row, float("-inf"))
    before = 0.0
    for token, prob in zip(kept, probs.tolist(), strict=True):
        if (top_p >= 1 or before < top_p) and prob >= min_p * float(probs[0]):
            out[token] = row[token]
        before += prob
    return out


@pytest.mark.parametrize("vocab", [1, 97, 1024])
def test_truncate(ops: CpuOps, vocab: int) -> None:
    logits = awkward(vocab)
    count = len(logits)
    cases = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (20, 0.83, 0.03), (1, 1.0, 0.0)]
    for top_k, top_p, min_p in [*cases, (0, 0.01, 0.0), (3, 0.999, 0.0)]:
        got = ops.sampling.truncate(
            logits,
            torch.full((count,), top_k),
            torch.full((count,), top_p),
            torch.full((count,), min_p),
        )
        p, m = float(torch.tensor(top_p)), float(torch.tensor(min_p))
        for i, row in enumerate(logits):
            expected = truncated(row, min(top_k, vocab), p, m)
            assert torch.equal(got[i], expected), (i, top_k, top_p, min_p)


def test_sampling_ops_stay_in_bounds_with_nan(ops: CpuOps) -> None:
    logits = torch.full((3, 259), float("nan"))
    logits[1, 7] = 1.0
    logits[2] = rand(259)
    logits[2, 100] = float("nan")
    ids = ops.sampling.top(logits, 259)[1]
    assert ((ids >= 0) & (ids < 259)).all()
    assert ((ops.sampling.argmax(logits) >= 0) & (ops.sampling.argmax(logits) < 259)).all()
    sampled = ops.sampling.gumbel_argmax(logits, torch.zeros(3).long(), torch.zeros(3).long(), 0)
    assert ((sampled >= 0) & (sampled < 259)).all()
    ops.sampling.logsumexp(logits)
    ops.sampling.rank(logits, torch.zeros(3).long())
    limits = (torch.full((3,), 5), torch.full((3,), 0.5), torch.full((3,), 0.1))
    ops.sampling.truncate(logits, *limits)


def test_ops_accept_zero_rows(ops: CpuOps) -> None:
    none = torch.empty(0, 97)
    empty = torch.empty(0, dtype=torch.int64)
    assert ops.sampling.argmax(none).shape == (0,)
    assert ops.sampling.gumbel_argmax(none, empty, empty, 0).shape == (0,)
    assert ops.sampling.top(none, 5)[1].shape == (0, 5)
    assert ops.sampling.truncate(none, empty, torch.empty(0), torch.empty(0)).shape == (0, 97)
    assert ops.forward.linear(torch.empty(0, 8), ops.forward.pack_linear(rand(5, 8))).shape == (0, 5)
