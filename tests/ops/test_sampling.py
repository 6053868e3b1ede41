"""Sampling ops of every backend: noise, ties, order, truncation, independence of rows."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.ops import STREAM_ACCEPT, STREAM_RESIDUAL, STREAM_SAMPLE, STREAM_SYNTHETIC, Ops
from draftproof.ops.reference.sampling import gumbel, philox
from opcheck import POOL, bits, importable, rows_that_differ

OPS = importable()
OTHERS = {name: ops for name, ops in OPS.items() if name != "reference"}
REFERENCE = OPS["reference"]
STREAMS = (STREAM_SAMPLE, STREAM_ACCEPT, STREAM_RESIDUAL, STREAM_SYNTHETIC)
VOCABS = (1, 3, 61, 257)
INF = math.inf

every = pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
others = pytest.mark.parametrize("ops", OTHERS.values(), ids=OTHERS)


def rows_of(count: int, vocab: int, seed: int = 0) -> Tensor:
    """Return random rows, some flat, some with ties, some with -inf."""
    random = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn((count, vocab), generator=random)
    x[1::5] = x[1::5].round()  # ties
    x[2::5] = 0.0  # all equal
    x[3::5] = torch.where(torch.rand((len(x[3::5]), vocab), generator=random) < 0.7, -INF, x[3::5])
    x[3::5, vocab // 2] = 1.0  # never all of it
    x[4::5] = -x[4::5].abs() - 50
    return x


def edge_rows(vocab: int) -> Tensor:
    """Return rows of signed zeros, of one finite value, of none, and of values of very different sizes."""
    rows = torch.full((5, vocab), -INF)
    rows[0] = 0.0
    rows[0, ::2] = -0.0
    rows[1, vocab // 2] = -5.0
    scales = torch.tensor([[10.0], [1e5]])
    rows[3:] = scales * torch.randn((2, vocab), generator=torch.Generator().manual_seed(7))
    return rows


def keys(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    seeds = torch.randint(0, 2**63 - 1, (count,), generator=random)
    seeds[:4] = torch.tensor([0, 2**63 - 1, -1, 5 - 2**33])[:count]
    positions = torch.randint(0, 1 << 20, (count,), generator=random)
    positions[2:4] = torch.tensor([2**31, 2**32 - 1])[: max(0, count - 2)]
    return seeds, positions


# --- noise ----------------------------------------------------------------------------------------------


def cpu_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    numba = pytest.importorskip("numba")
    from draftproof.ops.cpu.sampling.philox import philox as native

    return tuple(numba.njit(lambda *words: native(*words))(*counter, *key))


@pytest.mark.parametrize("function", [philox, cpu_philox])
def test_philox_equals_published_vectors(function: Any) -> None:
    """Compare with the vectors that Random123 publishes for philox4x32-10."""
    ones = 0xFFFFFFFF
    assert function((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert function((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert function(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@every
def test_uniform_is_philox(ops: Ops) -> None:
    """Compare seed 0 at position 0 with the first word of the first known vector."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert float(ops.sampling.uniform(zero, zero, 0)[0]) == (0x6627E8D5 + 0.5) * 2.0**-32


@others
def test_uniform_equals_reference(ops: Ops) -> None:
    seeds, positions = keys(200)
    for stream in STREAMS:
        got, want = (each.sampling.uniform(seeds, positions, stream) for each in (ops, REFERENCE))
        assert got.dtype == torch.float64 and torch.equal(got, want)
    assert len(ops.sampling.uniform(seeds[:0], positions[:0], 0)) == 0


def test_streams_positions_and_seeds_are_independent() -> None:
    """Check that the 4 x 50 x 50 nearest keys give distinct draws; a shared counter would repeat."""
    ops = OPS.get("cpu", REFERENCE)
    seeds = torch.arange(50).repeat_interleave(50)
    positions = torch.arange(50).repeat(50)
    draws = torch.cat([ops.sampling.uniform(seeds, positions, stream) for stream in STREAMS])
    assert len(draws.unique()) == len(draws)
    assert abs(float(draws.mean()) - 0.5) < 0.02


@cache
def defined_samples(vocab: int, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, seeds, positions, and the reference token of each (cached, because it is slow)."""
    count = {61: 120, 5003: 6}.get(vocab, 50)
    scaled = torch.cat([rows_of(count, vocab), edge_rows(vocab)])
    seeds, positions = keys(len(scaled))
    return scaled, seeds, positions, REFERENCE.sampling.gumbel_argmax(scaled, seeds, positions, stream)


@others
@pytest.mark.parametrize("vocab", (*VOCABS, 16, 5003))
def test_gumbel_argmax_equals_reference(ops: Ops, vocab: int) -> None:
    """Compare many rows over two streams."""
    for stream in (STREAM_SAMPLE, STREAM_RESIDUAL):
        scaled, seeds, positions, want = defined_samples(vocab, stream)
        assert torch.equal(ops.sampling.gumbel_argmax(scaled, seeds, positions, stream), want)
        finite = torch.isfinite(scaled)
        assert bool(finite[torch.arange(len(want)), want][finite.any(1)].all())
    none = ops.sampling.gumbel_argmax(scaled[:0], seeds[:0], positions[:0], 0)
    assert none.shape == (0,) and none.dtype == torch.int64


def test_gumbel_argmax_equal_across_backends_on_a_large_vocabulary() -> None:
    """Compare the tokens of all backends for a vocabulary of 49152 + 3 with sharp and flat rows."""
    scaled = torch.cat([rows_of(20, 49155), 0.01 * rows_of(20, 49155, seed=1).clamp(min=-9)])
    seeds, positions = keys(len(scaled))
    found = [ops.sampling.gumbel_argmax(scaled, seeds, positions, 0) for ops in OTHERS.values()]
    assert all(torch.equal(one, found[0]) for one in found)
    token = int(found[0][20])  # one of the flat rows: check the winner against the definition
    value = scaled[20, token] + gumbel(int(seeds[20]), int(positions[20]), 0, token)
    some = [scaled[20, i] + gumbel(int(seeds[20]), int(positions[20]), 0, i) for i in range(0, 49155, 13)]
    assert float(value) >= float(max(some))


@every
def test_noise_is_bounded(ops: Ops) -> None:
    """Check that a token 27 below the best is never sampled."""
    scaled = torch.full((64, 61), -27.0)
    scaled[:, 17] = 0.0
    assert set(ops.sampling.gumbel_argmax(scaled, *keys(64), 0).tolist()) == {17}


def test_control_noise_depends_on_stream_and_position() -> None:
    ops = OPS.get("cpu", REFERENCE)
    scaled, (seeds, positions) = torch.zeros(500, 61), keys(500)
    plain = ops.sampling.gumbel_argmax(scaled, seeds, positions, STREAM_SAMPLE)
    for other in (
        ops.sampling.gumbel_argmax(scaled, seeds, positions, STREAM_RESIDUAL),
        ops.sampling.gumbel_argmax(scaled, seeds, positions + 1, STREAM_SAMPLE),
        ops.sampling.gumbel_argmax(scaled, seeds ^ (1 << 40), positions, STREAM_SAMPLE),
    ):
        assert int((other == plain).sum()) < 30  # 8 are expected by chance


# --- order ----------------------------------------------------------------------------------------------


@others
@pytest.mark.parametrize("vocab", (*VOCABS, 15, 1024))
def test_argmax_rank_and_top_equal_reference(ops: Ops, vocab: int) -> None:
    logits = torch.cat([rows_of(35, vocab), edge_rows(vocab)])
    assert torch.equal(ops.sampling.argmax(logits), REFERENCE.sampling.argmax(logits))
    for shift in range(3):
        ids = (torch.arange(len(logits)) * 7 + shift) % vocab
        assert torch.equal(ops.sampling.rank(logits, ids), REFERENCE.sampling.rank(logits, ids))
    for k in {1, min(2, vocab), min(5, vocab), min(20, vocab), -(-vocab // 2), vocab}:
        values, ids = ops.sampling.top(logits, k)
        want_values, want_ids = REFERENCE.sampling.top(logits, k)
        assert torch.equal(ids, want_ids) and torch.equal(values, want_values)
    empty = logits[:0]
    assert ops.sampling.argmax(empty).shape == (0,)
    assert [tuple(t.shape) for t in ops.sampling.top(empty, 1)] == [(0, 1), (0, 1)]
    assert ops.sampling.rank(empty, torch.zeros(0, dtype=torch.int64)).shape == (0,)


@every
def test_lowest_id_wins_a_tie(ops: Ops) -> None:
    row = torch.full((1, 300), -1.0)
    row[0, [7, 100, 299]] = 2.0
    assert ops.sampling.argmax(row).tolist() == [7]
    assert ops.sampling.top(row, 5)[1].tolist() == [[7, 100, 299, 0, 1]]
    ranks = [int(ops.sampling.rank(row, torch.tensor([i]))[0]) for i in (7, 100, 299, 0, 8)]
    assert ranks == [1, 2, 3, 4, 11]
    zeros = torch.tensor([[-0.0, 0.0, -0.0]])  # equal, so the id decides
    assert ops.sampling.argmax(zeros).tolist() == [0]
    assert ops.sampling.top(zeros, 3)[1].tolist() == [[0, 1, 2]]
    assert ops.sampling.rank(zeros, torch.tensor([2])).tolist() == [3]


@every
def test_top_5_is_a_prefix_of_top_20_and_ranks_agree(ops: Ops) -> None:
    logits = rows_of(25, 61)
    short, long = ops.sampling.top(logits, 5)[1], ops.sampling.top(logits, 20)[1]
    assert torch.equal(short, long[:, :5])
    for place in range(20):
        assert ops.sampling.rank(logits, long[:, place].contiguous()).tolist() == [place + 1] * 25


@others
@pytest.mark.parametrize("vocab", (*VOCABS, 4099))
def test_logsumexp_equals_reference(ops: Ops, vocab: int) -> None:
    """Compare within 1e-6; -inf adds nothing, large values do not overflow."""
    logits = torch.cat([rows_of(30, vocab), edge_rows(vocab)])
    logits[0] += 1000
    logits[1, 0] = INF
    got = ops.sampling.logsumexp(logits)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, REFERENCE.sampling.logsumexp(logits), rtol=1e-6, atol=1e-6)
    assert ops.sampling.logsumexp(logits[:0]).shape == (0,)


@every
def test_row_of_minus_infinity_changes_no_other_row(ops: Ops) -> None:
    """Check that no op fails on a row of -inf or changes another row."""
    rows = torch.full((3, 61), -INF)
    rows[1] = rows_of(1, 61)[0]
    assert torch.equal(ops.sampling.logsumexp(rows)[[0, 2]], torch.tensor([-INF, -INF]))
    assert ops.sampling.top(rows, 3)[1][0].tolist() == [0, 1, 2]
    assert ops.sampling.rank(rows, torch.tensor([7, 7, 60])).tolist()[::2] == [8, 61]
    zeros = torch.zeros(3)
    cut = ops.sampling.truncate(rows, torch.tensor([0, 5, 5]), torch.tensor([0.5, 0.9, 0.5]), zeros)
    assert bool((cut[[0, 2]] == -INF).all())
    keys_ = torch.arange(3), torch.arange(3)
    tokens = ops.sampling.gumbel_argmax(rows, *keys_, 0)
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 61
    alone = rows[1:2]
    assert torch.equal(ops.sampling.gumbel_argmax(alone, keys_[0][1:2], keys_[1][1:2], 0), tokens[1:2])
    limits_ = torch.tensor([5]), torch.tensor([0.9]), zeros[:1]
    assert torch.equal(ops.sampling.truncate(alone, *limits_), cut[1:2])


def test_cpu_sampling_ops_stay_in_bounds_with_nan() -> None:
    if "cpu" not in OPS:
        pytest.skip("needs the cpu backend")
    sampling, zeros = OPS["cpu"].sampling, torch.zeros(3, dtype=torch.int64)
    logits = torch.full((3, 259), math.nan)
    logits[1, 7] = 1.0
    logits[2] = rows_of(1, 259)[0]
    logits[2, 100] = math.nan
    best, sampled = sampling.argmax(logits), sampling.gumbel_argmax(logits, zeros, zeros, 0)
    for ids in (sampling.top(logits, 259)[1], best, sampled):
        assert ((ids >= 0) & (ids < 259)).all()
    sampling.logsumexp(logits)
    sampling.rank(logits, zeros)
    assert sampling.top(logits, 0)[0].shape == (3, 0)
    sampling.truncate(logits, torch.full((3,), 5), torch.full((3,), 0.5), torch.full((3,), 0.1))


# --- truncation -----------------------------------------------------------------------------------------


def limits(count: int) -> tuple[Tensor, Tensor, Tensor]:
    top_k = torch.tensor([0, 1, 2, 5, 40, 1000])[torch.arange(count) % 6]
    top_p = torch.tensor([1.0, 0.9, 0.5, 1e-6, 0.999])[torch.arange(count) % 5]
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.0, 1.0, 0.3, 0.01])[torch.arange(count) % 7]
    return top_k, top_p, min_p


def is_near_limit(row: Tensor, top_k: int, top_p: float, min_p: float) -> bool:
    """Return whether a limit is so close to a token that rounding may decide it."""
    x = row.double().sort(descending=True).values
    x = x[: top_k or None]
    probs = torch.exp(x - x[0])
    mass = probs.cumsum(0) / probs.sum()
    near_p = top_p < 1 and float((mass - top_p).abs().min()) < 1e-6
    return near_p or float((probs - min_p).abs().min()) < 1e-6 < min_p < 1


@others
@pytest.mark.parametrize("vocab", (1, 3, 61, 257, 1024))
def test_truncate_equals_reference(ops: Ops, vocab: int) -> None:
    scaled = rows_of(210, vocab)
    scaled[::5] += torch.randn((42, vocab), generator=torch.Generator().manual_seed(9)) * 1e-3
    scaled[4:200:5] = edge_rows(vocab).repeat(8, 1)
    before = bits(scaled)
    top_k, top_p, min_p = limits(210)
    got, want = (each.sampling.truncate(scaled, top_k, top_p, min_p) for each in (ops, REFERENCE))
    assert bits(scaled) == before, "the input is not changed"
    cases = enumerate(zip(scaled, top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True))
    clear = [r for r, case in cases if not is_near_limit(*case) or r % 5 == 2]
    assert len(clear) > 150
    assert torch.equal(got[clear], want[clear])
    assert ops.sampling.truncate(scaled[:0], top_k[:0], top_p[:0], min_p[:0]).shape == (0, vocab)


@every
def test_truncate_breaks_ties_by_id_and_keeps_the_best(ops: Ops) -> None:
    flat = torch.zeros(1, 40)

    def kept(k: int, p: float, m: float, row: Tensor = flat) -> list[int]:
        out = ops.sampling.truncate(row, torch.tensor([k]), torch.tensor([p]), torch.tensor([m]))
        return torch.isfinite(out)[0].nonzero()[:, 0].tolist()

    assert kept(3, 1.0, 0.0) == [0, 1, 2]
    assert kept(0, 1e-9, 0.0) == [0]
    assert kept(0, 0.26, 0.0) == list(range(11))  # 10 tokens hold 0.25, the 11th starts below 0.26
    assert kept(4, 0.5, 0.0) == [0, 1]  # the mass is that of what top_k kept
    assert kept(0, 1.0, 1.0) == list(range(40))
    sharp = torch.tensor([[0.0, 10.0, 0.0]])
    assert kept(0, 1e-9, 1.0, sharp) == [1]


# --- independence ---------------------------------------------------------------------------------------


@every
def test_sampling_rows_are_independent(ops: Ops) -> None:
    logits, (seeds, positions) = rows_of(POOL, 61), keys(POOL)
    ids = torch.arange(POOL) * 3 % 61
    top_k, top_p, min_p = limits(POOL)
    turns: dict[str, object] = {"counts": (2, 7, 8, 9, 16, 17, 33), "turns": 4}
    if ops.name == "reference":
        turns = {"counts": (2, 9), "turns": 1}
    for call in (
        lambda at: ops.sampling.argmax(logits[at]),
        lambda at: ops.sampling.gumbel_argmax(logits[at], seeds[at], positions[at], 0),
        lambda at: ops.sampling.uniform(seeds[at], positions[at], 1),
        lambda at: ops.sampling.logsumexp(logits[at]),
        lambda at: ops.sampling.rank(logits[at], ids[at]),
        lambda at: torch.cat([x.double() for x in ops.sampling.top(logits[at], 7)], dim=1),
        lambda at: ops.sampling.truncate(logits[at], top_k[at], top_p[at], min_p[at]),
    ):
        assert not rows_that_differ(call, **turns)


@others
def test_logsumexp_of_large_rows_is_independent(ops: Ops) -> None:
    logits = rows_of(POOL, 4099)
    assert not rows_that_differ(lambda at: ops.sampling.logsumexp(logits[at]), counts=(2, 3, 9, 17), turns=4)


def test_control_logsumexp_shifted_by_other_rows_is_detected() -> None:
    """Use one shift for the whole call, as a wrong vectorisation would."""
    logits = rows_of(POOL, 61)

    def shifted_together(at: list[int]) -> Tensor:
        peak = logits[at].max()
        return peak + torch.log(torch.exp(logits[at] - peak).sum(-1))

    assert rows_that_differ(shifted_together)
