"""hybrid: several proposers, and for each request and step the one that is likely to bring most.

All of them guess, in the step, from the same committed tokens. Each guess is given a worth: the drafts of it
that are expected to stand. A search says so itself, from how long and how often it has matched; of others it
is reckoned from what became of their drafts in this request, and while nothing is known from a hope. The best
is taken (`Ops.arbitrate`); where it is short of the budget, a search goes on from its last draft. Nothing of
the choice depends on a draft that was drawn, so whatever law the drafts had they still have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftproof.config import MAX_SPECULATIVE_TOKENS
from draftproof.errors import ConfigError, nearest
from draftproof.models.config import ModelConfig
from draftproof.ops.drafting import Record
from draftproof.propose import PROPOSERS, DeviceProposer, ProposerEnv
from draftproof.propose.pool import Ints
from draftproof.registry import lookup
from draftproof.types import DeviceBatch, Draft, Request


class HybridProposer(DeviceProposer):
    defaults = {"proposers": None}

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        super().__init__(env, options)
        wanted = _members(self.options)
        self.members = [kind(env, mine) for kind, mine, _ in wanted]
        self.limits = [limit or env.k for _, _, limit in wanted]
        models = [member for member in self.members if member.follows_rows]
        if len(models) > 1:
            raise ConfigError("hybrid: one of its proposers may have a model of its own, not several")
        says = {name: any(getattr(m, name) for m in self.members) for name in _ANY}
        # what a class says of itself, a hybrid says of its members
        self.__dict__.update(
            **says,
            sources=tuple(source for member in self.members for source in member.sources),
            cheap=all(member.cheap for member in self.members),
        )
        self.taps = models[0].taps if models else ()
        self.search = next((i for i, m in enumerate(self.members) if m.extends), -1)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=env.ops.device)

        shape = (env.num_slots, len(self.members))
        self.record = Record(zeros(4, env.num_slots) - 1, zeros(*shape), zeros(*shape))

    @classmethod
    def storage(cls, options: Mapping[str, Any], target: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
        sizes = [kind.storage(mine, target, dtype) for kind, mine, _ in _members(options)]
        return sum(each for each, _ in sizes), sum(besides for _, besides in sizes)

    # --- the host's part ----------------------------------------------------------------------------

    def start(self, slot: int, request: Request) -> None:
        for member in self.members:
            member.start(slot, request)

    def stop(self, slot: int) -> None:
        for member in self.members:
            member.stop(slot)

    def learn(self, request: Request, ids: Ints) -> None:
        for member in self.members:
            if member.learns:
                member.learn(request, ids)

    def prepare(self) -> None:
        for member in self.members:
            member.prepare()

    # --- the device's -------------------------------------------------------------------------------

    def draft(self, batch: DeviceBatch) -> Draft:
        drafts, worths = [], []
        for member, limit in zip(self.members, self.limits, strict=True):
            draft, worth = self._ask(member, self._mine(batch, limit))
            drafts.append(draft)
            worths.append(worth)
        tokens, made, whose, room = self.env.ops.arbitrate(
            batch.columns,
            batch.slots,
            batch.budget,
            self.record,
            torch.stack([draft.tokens for draft in drafts]),
            torch.stack([draft.count for draft in drafts]),
            torch.stack(worths),
            self.search,
        )
        count = made
        if self.search >= 0:
            further = replace(batch, budget=room)
            tokens, count, _ = self.members[self.search].extend(further, (tokens, made))
        if not (batch.traits and batch.traits.logprobs):  # they are not read
            drafts = [replace(draft, logprobs=None) for draft in drafts]
        return self._with_thoughts(Draft(tokens, count, sources=whose), drafts, made)

    def _mine(self, batch: DeviceBatch, limit: int) -> DeviceBatch:
        """What a member with a limit of its own is asked."""
        if limit >= self.env.k:
            return batch
        traits = batch.traits and replace(batch.traits, rounds=min(batch.traits.rounds, limit))
        return replace(batch, budget=batch.budget.clamp(max=limit), traits=traits)

    def _ask(self, member: DeviceProposer, batch: DeviceBatch) -> tuple[Draft, Tensor]:
        if member.extends:
            tokens, count, worth = member.extend(batch, None)
            return Draft(tokens, count), worth
        draft = member.draft(batch)
        count = torch.minimum(draft.count, batch.budget)
        return replace(draft, count=count), torch.full_like(count, -1)

    def _with_thoughts(self, chosen: Draft, drafts: Sequence[Draft], made: Tensor) -> Draft:
        """With logprobs and laws of the drafts whose member gives them; the others were certain."""
        assert chosen.sources is not None
        if all(draft.logprobs is None and draft.probs is None for draft in drafts):
            return chosen
        place = torch.arange(chosen.tokens.shape[1], device=made.device)
        begun, own, laws = place < made[:, None], None, None
        for i, draft in enumerate(drafts):
            its = begun & (chosen.sources == i)
            if draft.logprobs is not None:
                own = torch.full_like(draft.logprobs, math.nan) if own is None else own
                own = torch.where(its, draft.logprobs, own)
            if draft.probs is not None:
                if laws is None:
                    legal = chosen.tokens.clamp(0, self.env.vocab_size - 1)
                    laws = torch.zeros_like(draft.probs).scatter_(2, legal[..., None], 1.0)
                laws = torch.where(its[..., None], draft.probs, laws)
        return replace(chosen, logprobs=own, probs=laws)


_ANY = ("needs_hidden", "reports_probs", "stores_kv", "follows_rows", "learns")
_Member = tuple[type[DeviceProposer], dict[str, Any], int | None]


def _members(options: Mapping[str, Any]) -> list[_Member]:
    """Classes, their options, and how many drafts each may make."""
    given = options.get("proposers")
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) < 2:
        raise ConfigError(
            "hybrid needs 'proposers', two at least, such as "
            '[{"method": "suffix"}, {"method": "eagle3", "model": "FOLDER"}]'
        )
    return [_member(one) for one in given]


def _member(given: Any) -> _Member:
    if not isinstance(given, Mapping) or not isinstance(given.get("method"), str):
        raise ConfigError(f"hybrid: each of its proposers is a mapping with a 'method', got {given!r}")
    mine = dict(given)
    method, limit = mine.pop("method"), mine.pop("num_speculative_tokens", None)
    kind = lookup(PROPOSERS, method, "speculative method")
    if kind is HybridProposer or not issubclass(kind, DeviceProposer):
        able = [n for n in PROPOSERS if n not in ("hybrid", "given")]
        raise ConfigError(
            f"hybrid: {method!r} does not guess on the device, which its members must: {', '.join(able)}"
        )
    if len(kind.sources) > 1:
        raise ConfigError(f"hybrid: {method!r} names several sources itself, which a member must not")
    for key in mine:
        if key not in kind.defaults:
            raise ConfigError(f"hybrid: {method!r} has no key {key!r}: {nearest(key, kind.defaults)}")
    wrong = isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_SPECULATIVE_TOKENS
    if limit is not None and wrong:
        raise ConfigError(
            f"hybrid: num_speculative_tokens of {method!r} must be an integer in 1..{MAX_SPECULATIVE_TOKENS}"
        )
    return kind, mine, limit
