"""hybrid: several proposers, and for each request and step the one that is likely to bring most.

All of them guess, in the step, from the same committed tokens. Each guess is given a worth: the drafts of it
that are expected to stand. A search says so itself, from how long and how often it has matched; of others it
is reckoned from what became of their drafts in this request, and while nothing is known from a hope. The best
is taken; where it is short of the budget, a search goes on from its last draft. Nothing of the choice depends
on a draft that was drawn, so whatever law the drafts had they still have.
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
from draftproof.ops.drafting import UNIT
from draftproof.propose import PROPOSERS, DeviceProposer, ProposerEnv
from draftproof.propose.pool import Ints
from draftproof.registry import lookup
from draftproof.types import DeviceBatch, Draft, Request

HOPE = (2.0, 1.0)  # drafts that stood and that fell, of one of whom nothing is known
MEMORY = 0.9  # weight of what was known, at every step
REACH = 0.2  # drafts are gone on with if they are expected to stand, all of them, with so much


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
        self.first_source = [sum(len(m.sources) for m in self.members[:i]) for i in range(len(self.members))]
        self.search = next((m for m in self.members if m.extends), None)
        # of each slot, and one line for nobody: whose request, its length, drafts it was given, by whom
        shape, device = (env.num_slots + 1, len(self.members)), env.ops.device
        self._past = torch.full((4, shape[0]), -1, dtype=torch.int64, device=device)
        self._stood, self._fell = torch.zeros((2, *shape), device=device)

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
        rates = self._rates(batch)
        drafts, worths = [], []
        for i, member in enumerate(self.members):
            draft, worth = self._ask(member, self._mine(batch, self.limits[i]))
            if worth is None:
                worth = _expected(rates[:, i], draft.count)
            drafts.append(draft)
            worths.append(worth)
        who = torch.stack(worths).argmax(0)  # [B]; it may be any of equals
        chosen = self._chosen(drafts, who)
        made = chosen.count
        if self.search is not None:
            at = self.members.index(self.search)
            all_stand = rates.gather(1, who[:, None])[:, 0] ** made
            goes_on = (who != at) & (all_stand >= REACH) & (made > 0)
            further = replace(batch, budget=torch.where(goes_on, batch.budget, 0))
            tokens, count, _ = self.search.extend(further, (chosen.tokens, made))
            assert chosen.sources is not None
            place = torch.arange(tokens.shape[1], device=tokens.device)
            sources = torch.where(place < made[:, None], chosen.sources, self.first_source[at])
            chosen = replace(chosen, tokens=tokens, count=count, sources=sources.to(torch.int8))
        self._remember(batch, chosen.count, made, who)
        return self._with_laws(chosen, drafts, who, made)

    def _mine(self, batch: DeviceBatch, limit: int) -> DeviceBatch:
        """What a member with a limit of its own is asked."""
        if limit >= self.env.k:
            return batch
        traits = batch.traits and replace(batch.traits, rounds=min(batch.traits.rounds, limit))
        return replace(batch, budget=batch.budget.clamp(max=limit), traits=traits)

    def _ask(self, member: DeviceProposer, batch: DeviceBatch) -> tuple[Draft, Tensor | None]:
        if not member.extends:
            draft = member.draft(batch)
            return replace(draft, count=torch.minimum(draft.count, batch.budget)), None
        tokens, count, worth = member.extend(batch, None)
        return Draft(tokens, count), worth / UNIT

    def _chosen(self, drafts: Sequence[Draft], who: Tensor) -> Draft:
        """Of each entry the drafts of member `who`."""
        at = torch.arange(len(who), device=who.device)
        own = [_filled(d.logprobs, d.tokens, math.nan, torch.float32) for d in drafts]
        sources = [
            _filled(d.sources, d.tokens, 0, torch.int8) + first
            for d, first in zip(drafts, self.first_source, strict=True)
        ]
        return Draft(
            torch.stack([d.tokens for d in drafts])[who, at],
            torch.stack([d.count for d in drafts])[who, at],
            torch.stack(own)[who, at],
            None,
            torch.stack(sources)[who, at].to(torch.int8),
        )

    def _with_laws(self, chosen: Draft, drafts: Sequence[Draft], who: Tensor, made: Tensor) -> Draft:
        """With the law of every draft, if one of the members says its: the others were certain."""
        laws = [(i, draft.probs) for i, draft in enumerate(drafts) if draft.probs is not None]
        place = torch.arange(chosen.tokens.shape[1], device=who.device)
        logprobs = torch.where(place < made[:, None], chosen.logprobs, math.nan)  # type: ignore[arg-type]
        if not laws:
            return replace(chosen, logprobs=logprobs)
        legal = chosen.tokens.clamp(0, self.env.vocab_size - 1)
        probs = torch.zeros_like(laws[0][1]).scatter_(2, legal[..., None], 1.0)
        for i, law in laws:
            its = (who == i)[:, None] & (place < made[:, None])
            probs = torch.where(its[..., None], law, probs)
        return replace(chosen, logprobs=logprobs, probs=probs)

    # --- what became of earlier drafts --------------------------------------------------------------

    def _lines(self, batch: DeviceBatch) -> Tensor:
        return torch.where(batch.slots < 0, self._past.shape[1] - 1, batch.slots)

    def _rates(self, batch: DeviceBatch) -> Tensor:
        """[B, M] how likely a draft of each member is to stand, as far as this request has shown."""
        line, slot, columns = self._lines(batch), batch.slots.clamp(min=0), batch.columns
        seed, length, count, who = self._past[:, line]
        same = (seed == columns.seed[slot])[:, None]
        accepted = torch.minimum((columns.length[slot] - length - 1).clamp(min=0), count)
        member = torch.arange(len(self.members), device=line.device)
        its = (member == who[:, None]) & same & (count > 0)[:, None]
        stood = torch.where(same, self._stood[line], 0.0) * MEMORY + its * accepted[:, None]
        fell = torch.where(same, self._fell[line], 0.0) * MEMORY + its * (accepted < count)[:, None]
        self._stood[line], self._fell[line] = stood, fell
        rates: Tensor = (stood + HOPE[0]) / (stood + fell + sum(HOPE))
        return rates

    def _remember(self, batch: DeviceBatch, count: Tensor, made: Tensor, who: Tensor) -> None:
        """Drafts are counted for the one who began."""
        slot = batch.slots.clamp(min=0)
        counted = torch.minimum(torch.minimum(made, count), batch.budget)
        facts = batch.columns.seed[slot], batch.columns.length[slot], counted, who
        self._past[:, self._lines(batch)] = torch.stack(facts)


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
    for key in mine:
        if key not in kind.defaults:
            raise ConfigError(f"hybrid: {method!r} has no key {key!r}: {nearest(key, kind.defaults)}")
    wrong = isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_SPECULATIVE_TOKENS
    if limit is not None and wrong:
        raise ConfigError(
            f"hybrid: num_speculative_tokens of {method!r} must be an integer in 1..{MAX_SPECULATIVE_TOKENS}"
        )
    return kind, mine, limit


def _expected(rate: Tensor, count: Tensor) -> Tensor:
    """Drafts that stand if each does with rate [B]: rate + rate^2 + ... of `count` terms."""
    return rate * (1 - rate**count) / (1 - rate).clamp(min=1e-3)


def _filled(given: Tensor | None, like: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    return torch.full_like(like, value, dtype=dtype) if given is None else given.to(dtype)
