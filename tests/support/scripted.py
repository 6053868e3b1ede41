"""A step on scripted logits without a model.

Slots, layout, features, sampler and commit are those of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.engine.sequence import Sequence as Running
from draftproof.engine.slots import Slots
from draftproof.engine.step.step_features import features_of
from draftproof.ops import Layout, Ops, Rows, resolve
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import (
    FINISH_STATUS,
    NUM_ACCEPTED,
    NUM_OUT,
    TOKENS,
    Choice,
    Draft,
    FinishStatus,
    Outcome,
    PlanColumns,
    Request,
    SlotColumns,
    Windows,
)
from draftproof.verify import STRATEGIES
from draftproof.verify.base import Strategy
from draftproof.verify.sampler import Sampled, Sampler

CPU = torch.device("cpu")
OPS: Ops = resolve("auto", CPU)
PAGE = 1 << 20  # one page holds any request
V = 16
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=20)


def ranked(*rows: list[int], gap: float = 3.0) -> Tensor:
    """Return rows of logits whose best tokens are the named ones, `gap` apart; the others are far below."""
    out = torch.full((len(rows), V), -40.0) + 0.01 * torch.arange(V)
    for line, tokens in zip(out, rows, strict=True):
        for place, token in enumerate(tokens):
            line[token] = 5.0 - gap * place
    return out


def noise(rows: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn((rows, V), generator=torch.Generator().manual_seed(seed))


def strategy(name: str, ops: Ops = OPS, **options: Any) -> Strategy:
    made: Strategy = lookup(STRATEGIES, name, "verify_strategy")(ops, options)
    return made


def filled_slots(
    requests: Sequence[Request], k: int, vocab: int, max_len: int = 64, used: Sequence[int] = ()
) -> Slots:
    """Return slots with request i in slot i, its prompt computed, and unwritten memory poisoned."""
    slots = Slots(len(requests), max_len, k, 1, vocab, OPS)
    slots.poison()
    inits = []
    for i, request in enumerate(requests):
        limit = min(max_len, len(request.prompt_token_ids) + (request.params.max_tokens or max_len))
        inits.append(Running(request, limit, slot=slots.take(request), strategy=used[i] if used else 0))
    assert [init.slot for init in inits] == list(range(len(requests)))
    slots.fill(inits)
    slots.columns.computed.copy_(slots.columns.length - 1)
    return slots


def put(slots: Slots, drafts: Sequence[Sequence[int]]) -> None:
    """Store drafts of every slot; memory past them stays poisoned."""
    for line, tokens in zip(slots.columns.draft, drafts, strict=True):
        line[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    slots.columns.num_draft.copy_(torch.tensor([len(tokens) for tokens in drafts]))


def layout_windows(
    columns: SlotColumns, plan: PlanColumns, rows: int, probs: Tensor | None = None, ops: Ops = OPS
) -> Windows:
    """Return the windows of a step of decoding requests."""

    def ints(count: int, size: int) -> list[Tensor]:
        return list(torch.full((count, size), -(2**40)))

    layout = Layout(
        Rows(*ints(4, rows), page_table=columns.page_table),
        Windows(columns, *ints(3, len(plan.slots)), *ints(4, rows), draft_probs=probs),
        ints(1, rows)[0],
    )
    ops.step.layout(plan, columns, PAGE, layout)
    return layout.windows


def decoding(slots: Tensor, k: int) -> PlanColumns:
    none = torch.zeros_like(slots)
    return PlanColumns(slots, none, torch.full_like(slots, k), none)


def committed(
    windows: Windows, plan: PlanColumns, choice: Choice, bad: Tensor, k: int, ops: Ops = OPS
) -> Outcome:
    rows = torch.full((2, len(windows.slot)), -(2**40))
    outcome = Outcome(torch.full((len(plan.slots), TOKENS + k + 1), -(2**40)), *rows)
    ops.step.commit(plan, windows, choice, bad, outcome)
    return outcome


@dataclass
class Result:
    tokens: list[list[int]]  # committed
    accepted: list[int]  # number of drafts among them
    ended: list[FinishStatus]
    windows: Windows
    sampled: Sampled
    outcome: Outcome
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
    """Run one step of len(drafts) requests on logits [L, V]; the rows of a window are adjacent."""
    n = len(drafts)
    each = [params] * n if isinstance(params, SamplingParams) else list(params)
    if isinstance(strategies, str):
        strategies = strategy(strategies)
    mine = [strategies] * n if isinstance(strategies, Strategy) else list(strategies)
    used = list(dict.fromkeys(mine))
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
    slots = filled_slots(
        requests,
        k,
        logits.shape[1],
        max_len,
        [used.index(verifier) for verifier in mine],
    )
    put(slots, drafts)
    return run_step(slots, logits, used, policy, probs)


def run_step(
    slots: Slots,
    logits: Tensor,
    used: Sequence[Strategy],
    policy: dict[str, Any] | None = None,
    probs: Tensor | None = None,
    ops: Ops = OPS,
) -> Result:
    """Run all parts of a step after the forward pass, for every filled slot."""
    columns = slots.columns
    n, k = columns.draft.shape
    config = SpeculativeConfig.parse({"method": "x", "num_speculative_tokens": k, **(policy or {})})
    requests = [request for request in slots.requests if request is not None]
    running = [Running(r, 0, strategy=int(columns.strategy[i])) for i, r in enumerate(requests)]
    hosted = {i: r for i, r in enumerate(requests) if r.params.logits_processors or r.bad_word_ids}
    for i in hosted:
        running[i].has_host_processors = True
    plan = decoding(torch.arange(n), k)
    windows = layout_windows(columns, plan, len(logits), probs, ops)
    features = features_of(running, used, slots.vocab)
    sampled = Sampler(ops, used, config)(logits, windows, features, hosted)
    outcome = committed(windows, plan, sampled.choice, sampled.bad, k, ops)
    table = outcome.table
    return Result(
        tokens=[line[TOKENS : TOKENS + line[NUM_OUT]] for line in table.tolist()],
        accepted=table[:, NUM_ACCEPTED].tolist(),
        ended=[FinishStatus(number) for number in table[:, FINISH_STATUS].tolist()],
        windows=windows,
        sampled=sampled,
        outcome=outcome,
        slots=slots,
    )


# --- a Markov chain in place of a model ---

Drafter = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(previous token [B], seeds [B], output position [B]) -> (draft [B], its distribution [B, V])."""
Chains = Callable[[SlotColumns, Tensor], Draft]
"""(columns, slots [B]) -> drafts with their distributions."""


def simulate(
    table: Tensor,  # [V, V] the target's logits after each token
    params: SamplingParams,
    verifier: Strategy,
    drafter: Drafter | None,
    *,
    count: int,
    k: int,
    seed: int = 0,
    wrong: Callable[[Choice, Windows], Choice] | None = None,
    chains: Chains | None = None,
) -> Tensor:
    """Generate params.max_tokens tokens for each of `count` requests: [count, max_tokens].

    Windows of k drafts are laid out, verified with the real noise and committed. `wrong` alters choices.
    `chains` makes drafts if there is no drafter.
    """
    length, vocab = params.max_tokens or 1, table.shape[1]
    request = Request(id="x", prompt_token_ids=[0], params=params, seed=0)
    template = filled_slots([request], k, vocab, max_len=1 + length).columns
    columns = replace(
        template,
        **{f.name: getattr(template, f.name).repeat_interleave(count, 0) for f in fields(template)},
    )
    columns.seed.copy_(seed * 10_000_000 + torch.arange(count))
    probs = torch.zeros((count, k, vocab))
    sampler = Sampler(OPS, [verifier])
    features = features_of([Running(request, 0)], [verifier], vocab)
    while True:
        live = (columns.finish_status == FinishStatus.RUNNING).nonzero()[:, 0]
        if not len(live):
            assert (columns.length == 1 + length).all()
            return columns.tokens[:, 1 : 1 + length].clone()
        at = columns.length[live] - 1  # index in the output
        last = columns.tokens[live, at]
        inputs = last[:, None].repeat(1, k + 1)  # of every row of a window
        for j in range(k if drafter else 0):
            token, draft_probs = drafter(inputs[:, j], columns.seed[live], at + j)  # type: ignore[misc]
            columns.draft[live, j], probs[live, j] = token, draft_probs
            inputs[:, j + 1] = token
        columns.num_draft[live] = (length - at - 1).clamp(max=k) if drafter else torch.zeros_like(at)
        if chains is not None:
            draft = chains(columns, live)
            assert draft.probs is not None
            columns.draft[live], probs[live], columns.num_draft[live] = draft.tokens, draft.probs, draft.count
            inputs[:, 1:] = draft.tokens
        plan = decoding(live, k)
        windows = layout_windows(columns, plan, int((columns.num_draft[live] + 1).sum()), probs)
        entry = torch.zeros(count, dtype=torch.int64)
        entry[live] = torch.arange(len(live))
        logits = table[inputs[entry[windows.slot], windows.depth]]
        sampled = sampler(logits, windows, features, {})
        choice = sampled.choice if wrong is None else wrong(sampled.choice, windows)
        committed(windows, plan, choice, sampled.bad, k)
