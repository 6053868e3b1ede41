"""Proposers for tests, by the name "proposers:Name": random, always right, partly right, and with a model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

import tiny
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
from draftproof.models.weight_formats import quantize_linears
from draftproof.ops import STREAM_SAMPLE
from draftproof.propose import DeviceProposer, Proposer, ProposerEnv
from draftproof.types import DeviceBatch, Draft, ProposeBatch, Request

REQUESTS, TOKENS = 64, 1024  # size of the table of outputs


class _Scripted(Proposer):
    """Proposer that drafts from the recorded plain output of each request."""

    outputs: ClassVar[Mapping[str, list[int]]] = {}

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        self._requests: dict[int, Request] = {}

    def start(self, slot: int, request: Request) -> None:
        assert slot not in self._requests, "a slot started twice"
        self._requests[slot] = request

    def stop(self, slot: int) -> None:
        del self._requests[slot]

    def propose(self, batch: ProposeBatch) -> Draft:
        drafts = []
        for slot, budget, length in zip(batch.slots, batch.budget, batch.lengths, strict=True):
            request = self._requests[slot]
            done = length - len(request.prompt_token_ids)
            target = list(_Scripted.outputs.get(request.id, ())[done : done + budget])
            drafts.append(self.draft_tokens(random.Random(f"{request.seed} {length}"), target, budget))
        return Draft.from_lists(drafts, self.env.k)

    def draft_tokens(self, rng: random.Random, target: list[int], budget: int) -> list[int]:
        raise NotImplementedError


def set_outputs(outputs: Mapping[str, list[int]]) -> None:
    _Scripted.outputs = outputs
    _fill_tables()


@torch.inference_mode()
def _fill_tables() -> None:
    outputs = _Scripted.outputs
    only = next(iter(outputs.values())) if len(outputs) == 1 else ()
    for table in _OnDevice.tables.values():
        lines = torch.full(table.shape, 7)
        for i, line in enumerate(lines):
            output = torch.tensor(list(outputs.get(str(i), only))[:TOKENS], dtype=torch.int64)
            line[: len(output)] = output
        table.copy_(lines)


class Junk(_Scripted):
    """Random tokens, any number up to the budget, some outside the vocabulary."""

    sources = ("junk",)

    def draft_tokens(self, rng: random.Random, target: list[int], budget: int) -> list[int]:
        wild = [-1, -(2**40), self.env.vocab_size, 2**40]
        return [
            rng.choice(wild) if rng.random() < 0.1 else rng.randrange(self.env.vocab_size)
            for _ in range(rng.randint(0, budget))
        ]


class Perfect(_Scripted):
    """The plain output, and junk after its end."""

    sources = ("perfect",)

    def draft_tokens(self, rng: random.Random, target: list[int], budget: int) -> list[int]:
        return target + [7] * (budget - len(target))


class Flaky(_Scripted):
    """Right tokens up to a random place, then random ones."""

    sources = ("even", "odd")

    def draft_tokens(self, rng: random.Random, target: list[int], budget: int) -> list[int]:
        right = target[: rng.randint(0, len(target))]
        return right + [rng.randrange(self.env.vocab_size) for _ in range(budget - len(right))]


class Parity(Flaky):
    """Drafts of alternating sources."""

    def propose(self, batch: ProposeBatch) -> Draft:
        draft = super().propose(batch)
        return replace(draft, sources=(torch.arange(self.env.k) % 2).to(torch.int8).expand_as(draft.tokens))


class _OnDevice(DeviceProposer):
    """Drafts inside a step from the columns and a table of outputs, in tensors only.

    The table is indexed by seed: tests give request i the seed 1000 + i, or have one request.
    """

    tables: ClassVar[dict[torch.device, torch.Tensor]] = {}  # [requests, tokens], at a fixed address

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        table = torch.zeros((REQUESTS, TOKENS), dtype=torch.int64, device=env.ops.device)
        self.tables.setdefault(table.device, table)
        _fill_tables()

    def draft(self, batch: DeviceBatch) -> Draft:
        columns, slots = batch.columns, batch.slots.clamp(min=0)  # [B]
        table, ahead = self.tables[slots.device], torch.arange(self.env.k, device=slots.device)
        seed, length = columns.seed[slots], columns.length[slots]
        done = (length - columns.prompt_len[slots])[:, None] + ahead
        target = table[(seed - 1000).clamp(0, REQUESTS - 1)[:, None], done.clamp(0, TOKENS - 1)]  # [B, K]
        dice = (seed * 7919 + length * 104_729)[:, None] + torch.arange(self.env.k + 1, device=slots.device)
        dice = (dice * 2_654_435_761 % (1 << 40)) >> 9  # [B, 1 + K]
        tokens, count = self.choose(target, dice, batch.budget)
        return Draft(tokens, torch.where(batch.slots < 0, 0, count))

    def choose(
        self, target: torch.Tensor, dice: torch.Tensor, budget: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [B, K] and their number [B], at most the budget [B]; dice [B, 1 + K]."""
        raise NotImplementedError


class DeviceJunk(_OnDevice):
    sources = ("junk",)

    def choose(self, target, dice, budget):  # type: ignore[no-untyped-def]
        """Return tokens [B, K] and their number [B], at most the budget [B]; dice [B, 1 + K]."""
        rolled, vocab = dice[:, 1:], self.env.vocab_size
        wild = torch.where(rolled % 20 < 10, -(2**40), torch.where(rolled % 20 < 15, vocab, 2**40))
        return torch.where(rolled % 10 == 0, wild, rolled % vocab), dice[:, 0] % (budget + 1)


class DevicePerfect(_OnDevice):
    sources = ("perfect",)

    def choose(self, target, dice, budget):  # type: ignore[no-untyped-def]
        """Return tokens [B, K] and their number [B], at most the budget [B]; dice [B, 1 + K]."""
        return target, budget


class DeviceFlaky(_OnDevice):
    sources = ("flaky",)

    def choose(self, target, dice, budget):  # type: ignore[no-untyped-def]
        """Return tokens [B, K] and their number [B], at most the budget [B]; dice [B, 1 + K]."""
        right = dice[:, :1] % (budget[:, None] + 1)
        ahead = torch.arange(target.shape[1], device=target.device)
        return torch.where(ahead < right, target, dice[:, 1:] % self.env.vocab_size), budget


class SelfModel(Proposer):
    """Drafts of a whole model on the target's page ids, with the target's noise.

    Its only state is the number of committed tokens with KV in its own storage. With the target's weights
    every draft must be accepted and every hidden row must be equal.
    """

    sources = ("self",)
    needs_hidden = True
    stores_kv = True
    reports_probs = True
    defaults = {"weights": "llama/float32/none", "same": True}
    hidden_rows_checked: ClassVar[int] = 0

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        arch, dtype, quantization = self.options["weights"].split("/")
        made = tiny.checkpoint(arch, dtype)
        quantize_linears(made.weights, quantization, env.ops)
        model = create_model(made.config, made.weights, env.ops, env.max_len)
        self.runner = Runner(
            model,
            env.ops,
            made.dtype,
            num_pages=env.num_pages,
            page_size=env.page_size,
            max_rows=env.max_rows,
            kv_cache_dtype=env.kv_cache_dtype,
        )
        self._computed: dict[int, int] = {}

    def start(self, slot: int, request: Request) -> None:
        self._computed[slot] = 0

    def stop(self, slot: int) -> None:
        del self._computed[slot]

    def propose(self, batch: ProposeBatch) -> Draft:
        assert batch.hidden is not None and len(batch.hidden) == sum(batch.hidden_count)
        with batch.columns.tokens.device:
            return self._propose(batch)

    def _propose(self, batch: ProposeBatch) -> Draft:
        c, k = batch.columns, self.env.k
        b = len(batch.slots)
        draft = Draft(
            torch.zeros((b, k), dtype=torch.int64),
            torch.tensor(batch.budget),
            torch.full((b, k), torch.nan),
            torch.zeros((b, k, self.env.vocab_size)),
            torch.zeros((b, k), dtype=torch.int8),
        )
        active = [i for i in range(b) if batch.budget[i]]
        hidden = {i: self._catch_up(batch, i) for i in active}
        for j in range(max(batch.budget, default=0)):
            active = [i for i in active if batch.budget[i] > j]
            if j:  # the KV of the draft before lies past the committed tokens
                at = torch.tensor([batch.lengths[i] + j - 1 for i in active])
                slots = torch.tensor([batch.slots[i] for i in active])
                rows = self.runner.rows(draft.tokens[active, j - 1], at, slots, c.page_table)
                hidden = dict(zip(active, self.runner.forward(rows).clone(), strict=True))
            self._sample(batch, draft, active, j, torch.stack([hidden[i] for i in active]))
        return draft

    def _catch_up(self, batch: ProposeBatch, i: int) -> torch.Tensor:
        """Compute the committed tokens without KV, in chunks, and return the newest hidden row."""
        slot, length, c = batch.slots[i], batch.lengths[i], batch.columns
        at, parts = self._computed[slot], []
        begin = at
        while at < length:
            positions = torch.arange(at, min(length, at + self.env.max_rows))
            slots = torch.full_like(positions, slot)
            rows = self.runner.rows(c.tokens[slot, positions], positions, slots, c.page_table)
            parts.append(self.runner.forward(rows).clone())
            at += len(positions)
        self._computed[slot] = length
        mine = torch.cat(parts)
        if self.options["same"]:
            self._check_hidden(batch, i, begin, mine)
        return mine[-1]

    def _check_hidden(self, batch: ProposeBatch, i: int, begin: int, mine: torch.Tensor) -> None:
        skip, count = sum(batch.hidden_count[:i]), batch.hidden_count[i]
        theirs = batch.hidden[skip : skip + count]
        start = batch.hidden_start[i]
        assert start + count == batch.lengths[i] - 1, "hidden rows do not end at the newest KV"
        low = max(start, begin)
        overlap = start + count - low
        assert torch.equal(theirs[low - start :], mine[low - begin : low - begin + overlap]), "hidden differs"
        SelfModel.hidden_rows_checked += overlap

    def _sample(self, batch: ProposeBatch, draft: Draft, active: list[int], j: int, hidden: Any) -> None:
        """Sample draft j from this model's logits with the target's noise."""
        c, ops = batch.columns, self.env.ops
        slots = torch.tensor([batch.slots[i] for i in active])
        logits = self.runner.logits(hidden)
        heat = c.temperature[slots][:, None]
        cold = heat[:, 0] == 0
        scaled = logits / torch.where(heat == 0, 1.0, heat)
        position = torch.tensor([batch.lengths[i] + j for i in active]) - c.prompt_len[slots]
        tokens = ops.sampling.gumbel_argmax(scaled, c.seed[slots], position, STREAM_SAMPLE)
        tokens = torch.where(cold, ops.sampling.argmax(logits), tokens)
        logprobs = torch.log_softmax(scaled, -1)
        draft.tokens[active, j] = tokens
        draft.logprobs[active, j] = logprobs.gather(1, tokens[:, None])[:, 0]
        certain = torch.nn.functional.one_hot(tokens, self.env.vocab_size).float()
        draft.probs[active, j] = torch.where(cold[:, None], certain, logprobs.exp())
