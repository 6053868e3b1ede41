"""Acceptance of a head on held-out texts, without the engine: what the engine would have accepted.

The texts are what the target wrote. A chain of drafts that has been right so far has been fed the text's own
tokens, so one teacher-forced pass gives every chain up to its first miss, which is all that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from draftproof.ops import STREAM_SAMPLE, Ops
from draftproof.train.data.dataset import Batch, Text
from draftproof.train.model.head_module import HeadModule, Weights
from draftproof.train.model.target import Teacher

Rule = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # logits [R, draft vocab], seeds [R], positions [R] -> ids [R]
CHUNK = 512  # rows of logits over the whole vocabulary at a time
GROUP = 8  # texts at a time
SHARPER = (1.0, 1.05, 1.1, 1.15, 1.2)  # what a head's logits may be multiplied by


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of chains of K drafts, one after each other as an engine would walk through the texts."""

    length: float  # tokens committed a step, the target's own token included
    rates: tuple[float, ...]  # [K]: share of the steps in which the drafts up to this position stood
    steps: int

    def to_json(self) -> dict[str, Any]:
        return {"length": self.length, "rates": list(self.rates), "steps": self.steps}


class Examiner:
    """Tries heads on texts that were held out."""

    def __init__(self, teacher: Teacher, module: HeadModule, d2t: Tensor, ops: Ops, drafts: int) -> None:
        self.teacher = teacher
        self.module = module
        self.d2t = d2t  # [draft vocab] int64
        self.head = teacher.head[d2t]
        self.ops = ops
        self.drafts = drafts
        # where each id of the target stands among the head's; those it does not know get one column more
        self.t2d = d2t.new_full((len(teacher.head),), len(d2t))
        self.t2d[d2t] = torch.arange(len(d2t), device=d2t.device)

    def __call__(self, weights: Weights, texts: Sequence[Text], max_len: int) -> dict[str, Acceptance]:
        """By name: "greedy" of texts at temperature 0; "coupled" and "argmax" of those above it."""
        cold = [text for text in texts if text.temperature == 0]
        warm = [text for text in texts if text.temperature > 0]
        found = self.walk(weights, cold, max_len, {"greedy": self._best}) if cold else {}
        if warm:
            rules = {"coupled": self.coupled(warm[0].temperature), "argmax": self._best}
            found |= self.walk(weights, warm, max_len, rules)
        return found

    def _best(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return self.d2t[logits.argmax(-1)]

    def sharpest(self, weights: Weights, texts: Sequence[Text], max_len: int) -> dict[float, Acceptance]:
        """Of texts above temperature 0, by what the head's logits are multiplied with.

        A head that says what it knows hedges. Drafts and texts are picked by one noise, and agree more often
        if the head is somewhat surer than it ought to be.
        """
        warm = [text for text in texts if text.temperature > 0]
        if not warm:
            return {}
        rules = {str(factor): self.coupled(warm[0].temperature / factor) for factor in SHARPER}
        found = self.walk(weights, warm, max_len, rules)
        return {factor: found[str(factor)] for factor in SHARPER}

    def coupled(self, temperature: float) -> Rule:
        """The draft that the target's own noise picks from the head's law."""

        def rule(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
            picked = []
            for begin in range(0, len(logits), CHUNK):
                some = slice(begin, begin + CHUNK)
                scaled = F.pad(logits[some].float() / temperature, (0, 1), value=-torch.inf)
                scaled = scaled[:, self.t2d].contiguous()  # [rows, vocab]
                picked.append(
                    self.ops.sampling.gumbel_argmax(scaled, seeds[some], positions[some], STREAM_SAMPLE)
                )
            return torch.cat(picked)

        return rule

    @torch.no_grad()
    def walk(
        self, weights: Weights, texts: Sequence[Text], max_len: int, rules: Mapping[str, Rule]
    ) -> dict[str, Acceptance]:
        """Through every text as an engine would go, for each way to draft."""
        stood = {name: np.zeros(self.drafts, np.int64) for name in rules}
        steps, committed = dict.fromkeys(rules, 0), 0
        for begin in range(0, len(texts), GROUP):
            some = texts[begin : begin + GROUP]
            for text, hits in zip(some, self._hits(weights, some, max_len, rules), strict=True):
                last = min(len(text.tokens), max_len) - 1
                committed += max(0, last - text.prompt_length)
                for name in rules:
                    newest = text.prompt_length  # the newest token that the engine has
                    while newest < last:
                        right = hits[name][newest - 1, : last - newest]
                        count = len(right) if right.all() else int(right.argmin())
                        stood[name][:count] += 1
                        newest += min(count + 1, last - newest)
                        steps[name] += 1
        return {
            name: Acceptance(
                committed / max(1, steps[name]),
                tuple(float(x) for x in stood[name] / max(1, steps[name])),
                steps[name],
            )
            for name in rules
        }

    def _hits(
        self, weights: Weights, texts: Sequence[Text], max_len: int, rules: Mapping[str, Rule]
    ) -> list[dict[str, NDArray[np.bool_]]]:
        """[T, K] of each text and rule: is the draft of step j from row p the text's token p + 2 + j?"""
        batch = Batch.of(texts, max_len)
        tokens = self.ops.runtime.send(torch.from_numpy(batch.tokens))  # [B, T]
        lesson = self.teacher(tokens, self.module.config.aux_layers)
        embeds = F.embedding(F.pad(tokens, (0, self.drafts)), self.teacher.embedding)
        outputs = self.module.unroll(weights, lesson.features, embeds, self.drafts)
        normed = self.module.normed(weights, outputs)  # [K, B, T, hidden]
        found = []
        for index, text in enumerate(texts):
            hits = {name: np.zeros((tokens.shape[1], self.drafts), np.bool_) for name in rules}
            first, length = text.prompt_length - 1, int(batch.lengths[index])
            for step in range(self.drafts):
                rows = torch.arange(first, length - 2 - step, device=tokens.device)
                if not len(rows):
                    break
                logits = F.linear(normed[step, index, first : first + len(rows)], self.head)
                positions, seeds = rows + 2 + step - text.prompt_length, torch.full_like(rows, text.seed)
                said = tokens[index, first + 2 + step : length]
                for name, rule in rules.items():
                    right = rule(logits, seeds, positions) == said
                    hits[name][first : first + len(rows), step] = right.cpu().numpy()
            found.append(hits)
        return found
