"""Hybrid proposer: several proposers, and per request and step the drafts that are expected to bring most.

All members draft in the step, from the same committed tokens. A search reports how many of its drafts it
expects to be accepted; for others the expectation follows from what was accepted in this request. The best
drafts are taken (`Ops.select_drafts`), and where they are fewer than the budget a search extends them. The
choice never depends on a sampled draft, so every draft keeps its distribution. At most one member has a
model; it drafts last, and the policy limits its rounds (`engine/drafting/policy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftproof.array_types import Ints
from draftproof.errors import ConfigError, nearest
from draftproof.models.config import ModelConfig
from draftproof.models.weight_formats import WeightTensor
from draftproof.models.weights.update_source import WeightSource
from draftproof.ops.contract.draft_search import (
    FIXED_ONE,
    MAX_CANDIDATES,
    PRIOR_ACCEPTED,
    PRIOR_REJECTED,
    AcceptanceRecord,
    DraftCandidate,
)
from draftproof.propose import PROPOSERS
from draftproof.propose.base import DeviceProposer, ProposerEnv
from draftproof.registry import lookup
from draftproof.speculative_config import MAX_SPECULATIVE_TOKENS, check_number
from draftproof.types import DeviceBatch, Draft, Request


class MemberDrafts(NamedTuple):
    """Drafts of one member."""

    draft: Draft
    expected_tokens: Tensor | None  # [B] accepted tokens, in FIXED_ONE, if the member estimates them


class HybridProposer(DeviceProposer):
    """Proposer made of two to four members."""

    defaults = {"proposers": None}

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        """Build the members; the hybrid has the capabilities of any of them."""
        super().__init__(env, options)
        members = _parse_members(self.options)
        self.members = [member.kind(env, member.options) for member in members]
        self.limits = [member.limit or env.k for member in members]
        models = [member for member in self.members if member.runs_behind_steps]
        if len(models) > 1:
            raise ConfigError("hybrid: one of its proposers may have a model of its own, not several")
        # capabilities are class attributes of other proposers, but depend on the members here
        self.__dict__.update(
            {name: any(getattr(member, name) for member in self.members) for name in _ANY_MEMBER},
            sources=tuple(source for member in self.members for source in member.sources),
            is_free=all(member.is_free for member in self.members),
        )
        self.taps = models[0].taps if models else ()
        if models:
            self.__dict__.update(set_stored=models[0].set_stored, catch_up=models[0].catch_up)
        self.entries = models[0].entries if models else ()
        has_others = len(self.members) > len(models)
        self.model_source = _first(member.runs_behind_steps and has_others for member in self.members)
        self.extending_source = _first(member.can_extend for member in self.members)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=env.ops.device)

        self._zeros = zeros(env.num_slots)
        shape = (env.num_slots, len(self.members))
        self.record = AcceptanceRecord(zeros(4, env.num_slots) - 1, zeros(*shape), zeros(*shape))
        self.state_tensors = (self.record.last, self.record.accepted, self.record.rejected)

    @classmethod
    def storage(
        cls,
        options: Mapping[str, Any],
        target: ModelConfig,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
    ) -> tuple[int, int]:
        """Return the sums over the members."""
        sizes = [
            member.kind.storage(member.options, target, dtype, kv_cache_dtype)
            for member in _parse_members(options)
        ]
        return sum(per_token for per_token, _ in sizes), sum(fixed for _, fixed in sizes)

    @classmethod
    def needs_target(cls, options: Mapping[str, Any]) -> bool:
        """Return whether a member does."""
        return any(member.kind.needs_target(member.options) for member in _parse_members(options))

    # --- host ---------------------------------------------------------------------------------------

    def start(self, slot: int, request: Request) -> None:
        """Begin a request in all members."""
        self.record.last[:, slot].fill_(-1)  # the slot's last request may have had the same seed
        for member in self.members:
            member.start(slot, request)

    def stop(self, slot: int) -> None:
        """End the request in all members."""
        for member in self.members:
            member.stop(slot)

    def discard(self, slots: Tensor) -> None:
        """Count no acceptance for the drafts that were selected last."""
        self.record.last[2].index_fill_(0, slots, 0)

    def learn(self, request: Request, ids: Ints) -> None:
        """Give the tokens of a finished request to the members that learn."""
        for member in self.members:
            if member.learns:
                member.learn(request, ids)

    def forget(self) -> None:
        """Drop what the members have learned."""
        for member in self.members:
            member.forget()

    def check_weights(self, source: WeightSource) -> dict[str, WeightTensor]:
        """Return new weights of the member that has a model."""
        for member in self.members:
            if member.entries:
                return member.check_weights(source)
        return super().check_weights(source)

    def device_memory(self) -> tuple[Any, Sequence[Tensor]]:
        """Return the models and caches of all members."""
        parts = [member.device_memory() for member in self.members]
        return [tree for tree, _ in parts], [cache for _, caches in parts for cache in caches]

    def refresh_lm_head(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Take rows of the target's new LM head in all members."""
        for member in self.members:
            member.refresh_lm_head(rows)

    def prepare(self) -> None:
        """Prepare all members."""
        for member in self.members:
            member.prepare()

    def do_idle_work(self) -> None:
        """Do the deferred work of all members."""
        for member in self.members:
            member.do_idle_work()

    # --- device -------------------------------------------------------------------------------------

    def draft(self, batch: DeviceBatch) -> Draft:
        """Draft with all members, select per entry, and extend the selected drafts."""
        model, ops = self.model_source, self.env.ops
        others = [i for i in range(len(self.members)) if i != model]
        searching = ops.runtime.run_parallel(lambda: {i: self._member_drafts(i, batch) for i in others})
        try:
            begun = self.members[model].begin(batch) if model >= 0 else None
        finally:
            found = searching()
        if model >= 0:
            found[model] = self._model_drafts(replace(batch, begun=begun), found)
        candidates = [_candidate(found[i]) for i in range(len(found))]
        tokens, made, sources, room = ops.search.select_drafts(
            batch, self.record, candidates, self.extending_source
        )
        count, drafts = made, [found[i].draft for i in range(len(found))]
        is_only_search = others == [self.extending_source] and not self._may_fall_short(batch)
        if self.extending_source >= 0 and not is_only_search:
            extender = self.members[self.extending_source]
            tokens, count, _ = extender.extend(replace(batch, budget=room), (tokens, made))
        if not (batch.spec and batch.spec.needs_logprobs):
            drafts = [_without_logprobs(draft) for draft in drafts]
        return self._attach_draft_info(Draft(tokens, count, sources=sources), drafts, made)

    def _may_fall_short(self, batch: DeviceBatch) -> bool:
        """Return whether the model may make fewer drafts than the budget, which a search then extends."""
        if self.model_source < 0 or not self.num_rounds_run:
            return False
        rounds = self.env.k if batch.spec is None else batch.spec.rounds
        is_limited = min(rounds, self.limits[self.model_source]) < self.env.k
        return is_limited or batch.costs.round > 0 or self.members[self.model_source].stops_early

    def _model_drafts(self, batch: DeviceBatch, found: Mapping[int, MemberDrafts]) -> MemberDrafts:
        """Run the draft model. Where it stops early, only for entries that will take its drafts.

        The number of drafts of a model that stops early depends on sampled tokens. So entries are selected
        before its drafts are made, and its drafts are then selected: selecting by their number would
        condition the drafts of other members on sampled noise and break `rejection`.
        """
        model, limit = self.members[self.model_source], self.limits[self.model_source]
        rounds = min(batch.spec.rounds if batch.spec else self.env.k, limit)
        has_costs = batch.costs.round > 0
        if has_costs and not self._is_worth_a_round(batch, found, rounds):
            rounds = 0
        limited = _limited(batch, rounds) if rounds else batch
        if rounds and model.stops_early:
            limited = replace(limited, budget=self._selected_budget(limited, found))
            if has_costs and not limited.budget.any():
                rounds = 0
        if rounds:
            draft, expected = self._member_drafts(self.model_source, limited)
        else:  # it stores KV
            spec = batch.spec and batch.spec._replace(rounds=0)
            none = self._zeros[: len(batch.slots)]
            draft, expected = model.draft(replace(batch, budget=none, spec=spec)), None
        self.num_rounds_run = model.num_rounds_run if model.stops_early else rounds
        if has_costs and model.stops_early:
            expected = torch.where(draft.count > 0, FIXED_ONE * (self.env.k + 1), -1)
        return MemberDrafts(draft, expected)

    def _member_drafts(self, index: int, batch: DeviceBatch) -> MemberDrafts:
        member = self.members[index]
        limited = _limited(batch, self.limits[index])
        if member.can_extend:
            tokens, count, expected = member.extend(limited, None)
            return MemberDrafts(Draft(tokens, count), expected)
        draft = member.draft(limited)
        if limited.budget is not batch.budget or not member.respects_budget:
            draft = replace(draft, count=torch.minimum(draft.count, limited.budget))
        return MemberDrafts(draft, None)

    def _selected_budget(self, batch: DeviceBatch, found: Mapping[int, MemberDrafts]) -> Tensor:
        """Return the budget [B] where a full window of the model would be selected, else 0."""
        full = Draft(batch.columns.draft[: len(batch.slots)], batch.budget)
        members = {**found, self.model_source: MemberDrafts(full, None)}
        trial = AcceptanceRecord(*(part.clone() for part in self.state_tensors))
        candidates = [_candidate(members[i]) for i in sorted(members)]
        _, number, sources, _ = self.env.ops.search.select_drafts(batch, trial, candidates, -1)
        return batch.budget * ((number > 0) & (sources[:, 0] == self.model_source))

    def _is_worth_a_round(
        self, batch: DeviceBatch, found: Mapping[int, MemberDrafts], max_rounds: int
    ) -> bool:
        """Return whether rounds of the model gain more than they cost, beside the drafts already found.

        This waits for the device. Rounds are added while each gains its cost, by acceptance rates of the
        record before the last window.
        """
        estimates = [expected for _, expected in found.values() if expected is not None]
        if any(bool((expected >= FIXED_ONE * max_rounds).all()) for expected in estimates):
            return False  # the rounds cannot add a token
        slots, budget = batch.slots.cpu().numpy(), batch.budget.cpu().numpy()
        lines, record = np.maximum(slots, 0), self.record
        is_known = batch.columns.seed.cpu().numpy()[lines] == record.last[0].cpu().numpy()[lines]
        accepted, rejected = (
            np.where(is_known[:, None], part.cpu().numpy()[lines], 0) / FIXED_ONE
            for part in (record.accepted, record.rejected)
        )
        rates = (accepted + PRIOR_ACCEPTED) / (accepted + rejected + PRIOR_ACCEPTED + PRIOR_REJECTED)
        best = np.zeros(len(slots))
        for i, (draft, expected) in found.items():
            by_rate = rates[:, i] * (1 - rates[:, i] ** draft.count.cpu().numpy()) / (1 - rates[:, i])
            if expected is not None:
                given = expected.cpu().numpy()
                by_rate = np.where(given >= 0, given / FIXED_ONE, by_rate)
            best = np.maximum(best, by_rate)
        rate = np.where(slots >= 0, rates[:, self.model_source], 0.0)
        survival, gain, rounds = np.ones(len(slots)), np.zeros(len(slots)), 0
        while rounds < max_rounds:
            survival = survival * rate * (budget > rounds)
            if float(survival.sum()) <= batch.costs.round:
                break
            gain, rounds = gain + survival, rounds + 1
        return float(np.maximum(gain - best, 0).sum()) > rounds * batch.costs.round

    def _attach_draft_info(self, chosen: Draft, drafts: Sequence[Draft], made: Tensor) -> Draft:
        """Attach logprobs, ranks and distributions of the members that report them; others are certain."""
        assert chosen.sources is not None
        if all(draft.logprobs is None and draft.probs is None for draft in drafts):
            return chosen
        place = torch.arange(chosen.tokens.shape[1], device=made.device)
        is_selected, logprobs, probs, ranking = place < made[:, None], None, None, None
        for i, draft in enumerate(drafts):
            is_mine = is_selected & (chosen.sources == i)
            if draft.logprobs is not None:
                logprobs = torch.full_like(draft.logprobs, math.nan) if logprobs is None else logprobs
                logprobs = torch.where(is_mine, draft.logprobs, logprobs)
            if draft.ranking is not None:  # of the one member with a model
                ranking = replace(draft.ranking, ranks=torch.where(is_mine, draft.ranking.ranks, 0))
            if draft.probs is not None:
                if probs is None:
                    tokens = chosen.tokens.clamp(0, self.env.vocab_size - 1)
                    probs = torch.zeros_like(draft.probs).scatter_(2, tokens[..., None], 1.0)
                probs = torch.where(is_mine[..., None], draft.probs, probs)
        return replace(chosen, logprobs=logprobs, probs=probs, ranking=ranking)


def _without_logprobs(draft: Draft) -> Draft:
    if draft.logprobs is None and draft.ranking is None:
        return draft
    return replace(draft, logprobs=None, ranking=None)


def _candidate(member: MemberDrafts) -> DraftCandidate:
    return DraftCandidate(member.draft.tokens, member.draft.count, member.expected_tokens)


def _first(flags: Iterable[bool]) -> int:
    """Return the index of the first true flag, or -1."""
    return next((i for i, flag in enumerate(flags) if flag), -1)


def _limited(batch: DeviceBatch, count: int) -> DeviceBatch:
    """Return the batch for a member that may make so many drafts."""
    if count >= batch.columns.draft.shape[1]:
        return batch
    spec = batch.spec and batch.spec._replace(rounds=min(batch.spec.rounds, count))
    return replace(batch, budget=batch.budget.clamp(max=count), spec=spec)


_ANY_MEMBER = (
    "needs_hidden",
    "reports_probs",
    "stores_kv",
    "runs_behind_steps",
    "learns",
    "depends_on_prompts",
    "defers_kv",
)


class _Member(NamedTuple):
    """Member as configured."""

    kind: type[DeviceProposer]
    options: dict[str, Any]
    limit: int | None  # drafts that it may make


def _parse_members(options: Mapping[str, Any]) -> list[_Member]:
    given = options.get("proposers")
    if not isinstance(given, Sequence) or isinstance(given, str) or not 2 <= len(given) <= MAX_CANDIDATES:
        raise ConfigError(
            f"hybrid needs 'proposers', two to {MAX_CANDIDATES}, such as "
            '[{"method": "suffix"}, {"method": "eagle3", "model": "FOLDER"}]'
        )
    return [_parse_member(one) for one in given]


def _parse_member(given: Any) -> _Member:
    if not isinstance(given, Mapping) or not isinstance(given.get("method"), str):
        raise ConfigError(f"hybrid: each of its proposers is a mapping with a 'method', got {given!r}")
    mine = dict(given)
    method, limit = mine.pop("method"), mine.pop("num_speculative_tokens", None)
    kind = lookup(PROPOSERS, method, "speculative method")
    if kind.takes_prediction:
        raise ConfigError(f"hybrid: predictions are used beside any proposers, leave {method!r} out")
    if kind is HybridProposer or not issubclass(kind, DeviceProposer):
        able = [n for n in PROPOSERS if n not in ("hybrid", "given")]
        raise ConfigError(
            f"hybrid: {method!r} does not draft on the device, which its members must: {', '.join(able)}"
        )
    if len(kind.sources) > 1:
        raise ConfigError(f"hybrid: {method!r} names several sources itself, which a member must not")
    for key in mine:
        if key not in kind.defaults:
            raise ConfigError(f"hybrid: {method!r} has no key {key!r}: {nearest(key, kind.defaults)}")
    if limit is not None:
        check_number(f"hybrid: num_speculative_tokens of {method!r}", limit, 1, MAX_SPECULATIVE_TOKENS)
    return _Member(kind, mine, limit)
