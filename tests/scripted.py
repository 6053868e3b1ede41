"""A sampler without a model: scripted logits in, committed tokens out, many requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.config import SpeculativeConfig
from draftproof.engine.commit import Committed, commit
from draftproof.engine.slots import Slots
from draftproof.ops import Ops, resolve
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.types import Request, Windows
from draftproof.verify import STRATEGIES, Strategy
from draftproof.verify.sampler import Sampled, Sampler

CPU = torch.device("cpu")
OPS: Ops = resolve("auto", CPU)


def strategy(name: str, ops: Ops = OPS, **options: Any) -> Strategy:
    made: Strategy = lookup(STRATEGIES, name, "verify_strategy")(ops, options)
    return made


def seated(requests: Sequence[Request], k: int, vocab: int, max_len: int = 64) -> Slots:
    """Slots with these requests in them, slot i for request i, everything unwritten poisoned."""
    slots = Slots(len(requests), max_len, k, 1, vocab, CPU)
    slots.poison()
    slots._free.sort(reverse=True)
    for r in requests:
        limit = len(r.prompt_token_ids) + (r.params.max_tokens or max_len)
        slots.sit(r, [], min(max_len, limit))
    return slots


def windows_of(
    slots: Slots, drafts: Sequence[Sequence[int]] | tuple[Tensor, Tensor], probs: Tensor | None = None
) -> Windows:
    """One window a slot. Drafts as lists, or as (tokens [B, K], count [B]); the slack stays poisoned."""
    columns = slots.columns
    if isinstance(drafts, tuple):
        draft, count = drafts
    else:
        draft = columns.draft.clone()
        for line, guess in zip(draft, drafts, strict=True):
            line[: len(guess)] = torch.tensor(guess, dtype=torch.int64)
        count = torch.tensor([len(guess) for guess in drafts])
    rows = count + 1
    first = rows.cumsum(0) - rows
    owner = torch.arange(len(count)).repeat_interleave(rows)
    options = [slots.options_of(i) for i in range(len(count))]
    depth = torch.arange(len(owner)) - first[owner]
    return Windows(columns, torch.arange(len(count)), first, count, draft, probs, owner, depth, options)


@dataclass
class Result:
    tokens: list[list[int]]  # what was committed
    sampled: Sampled
    committed: Committed
    slots: Slots


def decide(
    logits: Tensor,
    drafts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams] | SamplingParams,
    strategies: Sequence[Strategy] | Strategy | str = "target_match",
    *,
    policy: dict[str, Any] | None = None,
    seeds: Sequence[int] = (),
    prompt: Sequence[int] = (1,),
    eos: Sequence[int] = (),
    probs: Tensor | None = None,
    max_len: int = 64,
) -> Result:
    """One step of len(drafts) requests: logits [L, V], rows of a window adjacent."""
    n = len(drafts)
    each = [params] * n if isinstance(params, SamplingParams) else list(params)
    if isinstance(strategies, str):
        strategies = strategy(strategies)
    judges = [strategies] * n if isinstance(strategies, Strategy) else list(strategies)
    requests = [
        Request(
            id=str(i),
            prompt_token_ids=prompt,
            params=each[i],
            seed=seeds[i] if seeds else 100 + i,
            eos_token_ids=eos,
        )
        for i in range(n)
    ]
    k = max([1, *(len(d) for d in drafts)])
    slots = seated(requests, k, logits.shape[1], max_len)
    windows = windows_of(slots, drafts, probs)
    config = SpeculativeConfig.parse({"method": "x", "num_speculative_tokens": k, **(policy or {})})
    sampled = Sampler(OPS, config)(logits, windows, judges)
    committed = commit(windows, sampled.verdict, torch.full((n,), k + 1))
    tokens = [
        line[:c] for line, c in zip(sampled.verdict.tokens.tolist(), committed.num_out.tolist(), strict=True)
    ]
    return Result(tokens, sampled, committed, slots)


# --- a Markov chain for a model ---------------------------------------------------------------------------

Drafter = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(previous token [B], seeds [B], output position [B]) -> (draft [B], its law [B, V])."""


def simulate(
    table: Tensor,  # [V, V] the target's logits after each token
    params: SamplingParams,
    judge: Strategy,
    drafter: Drafter | None,
    *,
    count: int,
    k: int,
    seed: int = 0,
    wrong: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """`count` requests that each generate params.max_tokens tokens: [count, max_tokens].

    Windows of k drafts, judged by the real sampler with the real noise, committed by the real commit;
    a window that ends early is followed by another. `wrong` spoils verdicts on purpose.
    """
    length, vocab = params.max_tokens or 1, table.shape[1]
    request = Request(id="x", prompt_token_ids=[0], params=params, seed=0)
    slots = seated([request], k, vocab)
    columns, options = slots.columns, slots.options_of(0)
    wide = {f: getattr(columns, f).repeat_interleave(count, 0) for f in columns.__dataclass_fields__}
    wide["seed"] = seed * 10_000_000 + torch.arange(count)
    columns = type(columns)(**wide)
    sampler = Sampler(OPS, None)
    while True:
        live = (columns.length < 1 + length).nonzero()[:, 0]
        if not len(live):
            return columns.tokens[:, 1 : 1 + length].clone()
        at = columns.length[live] - 1  # index in the output
        room = (length - at - 1).clamp(max=k) if drafter else torch.zeros_like(at)
        last = columns.tokens[live, columns.length[live] - 1]
        draft = torch.zeros((len(live), k), dtype=torch.int64)
        probs = torch.zeros((len(live), k, vocab))
        previous = [last]
        for j in range(k if drafter else 0):
            draft[:, j], probs[:, j] = drafter(previous[-1], columns.seed[live], at + j)  # type: ignore[misc]
            previous.append(draft[:, j])
        rows = room + 1
        first = rows.cumsum(0) - rows
        owner = torch.arange(len(live)).repeat_interleave(rows)
        depth = torch.arange(len(owner)) - first[owner]
        context = torch.stack(previous, dim=1)[owner, depth]
        windows = Windows(columns, live, first, room, draft, probs, owner, depth, [options] * len(live))
        verdict = sampler(table[context], windows, [judge] * len(live)).verdict
        if wrong is not None:
            verdict.tokens[:] = wrong(verdict.tokens, columns.seed[live])
        commit(windows, verdict, torch.full_like(room, k + 1))
