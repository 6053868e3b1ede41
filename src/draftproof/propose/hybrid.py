"""hybrid: several proposers, and for each request and step the one that is likely to bring most.

All of them guess, in the step, from the same committed tokens. Each guess is given a worth: the drafts of it
that are expected to stand. A search says so itself, from how long and how often it has matched; of others it
is reckoned from what became of their drafts in this request, and while nothing is known from a hope. The best
is taken (`select_drafts`); where it is short of the budget, a search goes on from its last draft. Nothing of
the choice depends on a draft that was drawn, so whatever law the drafts had they still have. A member with a
model is asked last, for as many rounds as are likely to bring more than the time they take (`engine/asking`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import ConfigError, nearest
from draftproof.models.config import ModelConfig
from draftproof.ops.contract.draft_search import (
    FIXED_ONE,
    MAX_CANDIDATES,
    PRIOR_ACCEPTED,
    PRIOR_REJECTED,
    AcceptanceRecord,
    DraftCandidate,
)
from draftproof.propose import PROPOSERS, DeviceProposer, ProposerEnv
from draftproof.propose.suffix_pool import Ints
from draftproof.registry import lookup
from draftproof.speculative_config import MAX_SPECULATIVE_TOKENS
from draftproof.types import DeviceBatch, Draft, Request

Said = tuple[Draft, Tensor | None]  # a member's drafts, and their worth if it says so
Found = Mapping[int, Said]


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
        others = len(self.members) > len(models)
        self.weighed = next((i for i, m in enumerate(self.members) if m.follows_rows and others), -1)
        self.search = next((i for i, m in enumerate(self.members) if m.extends), -1)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=env.ops.device)

        self._none = zeros(env.num_slots)
        shape = (env.num_slots, len(self.members))
        self.record = AcceptanceRecord(zeros(4, env.num_slots) - 1, zeros(*shape), zeros(*shape))
        self.remembers = (self.record.last, self.record.accepted, self.record.rejected)

    @classmethod
    def storage(cls, options: Mapping[str, Any], target: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
        sizes = [kind.storage(mine, target, dtype) for kind, mine, _ in _members(options)]
        return sum(each for each, _ in sizes), sum(besides for _, besides in sizes)

    # --- the host's part ----------------------------------------------------------------------------

    def start(self, slot: int, request: Request) -> None:
        self.record.last[:, slot].fill_(-1)  # the one before may have had the same seed
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

    def meanwhile(self) -> None:
        for member in self.members:
            member.meanwhile()

    # --- the device's -------------------------------------------------------------------------------

    def draft(self, batch: DeviceBatch) -> Draft:
        others = [i for i in range(len(self.members)) if i != self.weighed]
        asking = self.env.ops.runtime.run_parallel(lambda: {i: self._ask(i, batch) for i in others})
        try:
            begun = self.members[self.weighed].begin(batch) if self.weighed >= 0 else None
        finally:
            found = asking()
        if self.weighed >= 0:
            found[self.weighed] = self._ask_model(replace(batch, begun=begun), found)
        drafts = [found[i][0] for i in range(len(found))]
        offers = [self._offer(i, batch, found[i]) for i in range(len(found))]
        given = batch.columns, batch.slots, batch.budget, self.record, offers
        tokens, made, whose, room = self.env.ops.search.select_drafts(*given, self.search)
        count, alone = made, others == [self.search] and not self._falls_short(batch)
        if self.search >= 0 and not alone:  # behind its own drafts it has no others
            further = replace(batch, budget=room)
            tokens, count, _ = self.members[self.search].extend(further, (tokens, made))
        if not (batch.spec and batch.spec.needs_logprobs):  # they are not read
            drafts = [replace(draft, logprobs=None) for draft in drafts]
        return self._with_thoughts(Draft(tokens, count, sources=whose), drafts, made)

    def _falls_short(self, batch: DeviceBatch) -> bool:
        """May the model have drafts, but fewer than the budget? With as many as there can be, or with none, a
        search behind them would have no room."""
        rounds = self.env.k if batch.spec is None else batch.spec.rounds
        if self.weighed < 0 or not rounds:
            return False
        few = min(rounds, self.limits[self.weighed]) < self.env.k
        return few or batch.price > 0 or self.members[self.weighed].ends_chains

    def _ask_model(self, batch: DeviceBatch, found: Found) -> Said:
        """Its drafts, for whom they will be taken. Where the device is waited for, and nobody is to have any,
        it only keeps up."""
        model, most = self.members[self.weighed], self.limits[self.weighed]
        most = min(batch.spec.rounds if batch.spec else self.env.k, most)
        rounds = min(most, self._worth(batch, found)) if batch.price else most
        if rounds and batch.price and model.ends_chains:
            rounds = most  # it looks at them one by one
        if rounds:
            less = _at_most(batch, rounds)
            if model.ends_chains or batch.price:
                less = replace(less, budget=self._unbeaten(less, found))
            rounds = 0 if batch.price and not less.budget.any() else rounds
        if not rounds:
            spec = batch.spec and batch.spec._replace(rounds=0)
            less = replace(batch, budget=self._none[: len(batch.slots)], spec=spec)
        draft, worth = self._ask(self.weighed, less)
        self.asked_rounds = model.asked_rounds if model.ends_chains else rounds
        if batch.price and model.ends_chains:
            # That they are taken was settled before they were made. How many there are says how likely they
            # are, and must not settle it again: the others' drafts would be judged with noise chosen by that.
            worth = torch.where(draft.count > 0, FIXED_ONE * (self.env.k + 1), -1)
        return draft, worth

    def _offer(self, index: int, batch: DeviceBatch, said: Said) -> DraftCandidate:
        draft, worth = said
        return DraftCandidate(draft.tokens, draft.count, worth)

    def _ask(self, index: int, batch: DeviceBatch) -> Said:
        """Its drafts, and what they are worth, if it says so."""
        member, limit = self.members[index], self.limits[index]
        less = _at_most(batch, limit)
        if member.extends:
            tokens, count, worth = member.extend(less, None)
            return Draft(tokens, count), worth
        draft = member.draft(less)
        if less.budget is not batch.budget or not member.keeps_to_budget:
            draft = replace(draft, count=torch.minimum(draft.count, less.budget))
        return draft, None

    def _unbeaten(self, batch: DeviceBatch, found: Found) -> Tensor:
        """The budget of the model's drafts where they will be taken before others': whose, does not depend on
        what they are. It costs next to nothing to make none, where nobody is to have any; among FEW to SOME
        that is seldom so, and a round takes as long for all of them: there it is not asked."""
        offers = {i: self._offer(i, batch, said) for i, said in found.items()}
        mine = Draft(batch.columns.draft[: len(batch.slots)], batch.budget)
        offers[self.weighed] = self._offer(self.weighed, batch, (mine, None))
        record = self.record
        trial = AcceptanceRecord(record.last.clone(), record.accepted.clone(), record.rejected.clone())
        given = batch.columns, batch.slots, batch.budget, trial, [offers[i] for i in sorted(offers)]
        _, number, whose, _ = self.env.ops.search.select_drafts(*given, -1)
        return batch.budget * ((number > 0) & (whose[:, 0] == self.weighed))

    def _worth(self, batch: DeviceBatch, found: Found) -> int:
        """Rounds of the model that are worth their price, beside the drafts that the others have; 0: none.

        The device is waited for here. By the record as it was before the last window.
        """
        slots, record = batch.slots.clamp(min=0), self.record
        seeds, known = batch.columns.seed[slots].tolist(), record.last[0, slots].tolist()
        stood, fell = record.accepted[slots].tolist(), record.rejected[slots].tolist()
        others = [
            (i, draft.count.tolist(), [-1] * len(slots) if says is None else says.tolist())
            for i, (draft, says) in found.items()
        ]
        budget, most = batch.budget.tolist(), self.limits[self.weighed]
        best, chances = [], []  # of the others; that the model's next draft stands, 0: there is none
        for b, slot in enumerate(batch.slots.tolist()):
            told = (
                FIXED_ONE if seeds[b] == known[b] else math.inf
            )  # what is on record of another counts as nothing
            rates = [
                (up / told + PRIOR_ACCEPTED) / ((up + down) / told + PRIOR_ACCEPTED + PRIOR_REJECTED)
                for up, down in zip(stood[b], fell[b], strict=True)
            ]
            worths = [
                says[b] / FIXED_ONE
                if says[b] >= 0
                else rates[i] * (1 - rates[i] ** count[b]) / (1 - rates[i])
                for i, count, says in others
            ]
            best.append(max(worths, default=0.0))
            chances.append(rates[self.weighed] if slot >= 0 else 0.0)
        reached, brings, rounds = [1.0] * len(best), [0.0] * len(best), 0
        while rounds < most:
            reached = [
                r * chance * (room > rounds) for r, chance, room in zip(reached, chances, budget, strict=True)
            ]
            if sum(reached) <= batch.price:
                break
            brings = [sum(pair) for pair in zip(brings, reached, strict=True)]
            rounds += 1
        gain = sum(max(mine - its, 0.0) for mine, its in zip(brings, best, strict=True))
        return rounds if gain > rounds * batch.price else 0

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


def _at_most(batch: DeviceBatch, count: int) -> DeviceBatch:
    """The same for somebody who may make so many drafts."""
    if count >= batch.columns.draft.shape[1]:
        return batch
    spec = batch.spec and batch.spec._replace(rounds=min(batch.spec.rounds, count))
    return replace(batch, budget=batch.budget.clamp(max=count), spec=spec)


_ANY = ("needs_hidden", "reports_probs", "stores_kv", "follows_rows", "learns")
_Member = tuple[type[DeviceProposer], dict[str, Any], int | None]


def _members(options: Mapping[str, Any]) -> list[_Member]:
    """Classes, their options, and how many drafts each may make."""
    given = options.get("proposers")
    if not isinstance(given, Sequence) or isinstance(given, str) or not 2 <= len(given) <= MAX_CANDIDATES:
        raise ConfigError(
            f"hybrid needs 'proposers', two to {MAX_CANDIDATES}, such as "
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
