"""Acceptance of a head on held-out texts, without the engine: what the engine would have accepted.

The texts are what the target wrote. A chain of drafts that has been right so far has been fed the text's own
tokens, so one teacher-forced pass gives every chain up to its first miss, which is all that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from draftproof.ops import STREAM_SAMPLE, Ops
from draftproof.train.module import HeadModule, Weights
from draftproof.train.teacher import Teacher
from draftproof.train.texts import Batch, Text

Rule = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # logits [R, draft vocab], seeds [R], positions [R] -> ids [R]
CHUNK = 512  # rows of logits over the whole vocabulary at a time


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
        found = {}
        if cold:
            found["greedy"] = self._walk(weights, cold, max_len, self._best)
        if warm:
            found["coupled"] = self._walk(weights, warm, max_len, self._coupled(warm[0].temperature))
            found["argmax"] = self._walk(weights, warm, max_len, self._best)
        return found

    def _best(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return self.d2t[logits.argmax(-1)]

    def _coupled(self, temperature: float) -> Rule:
        """The draft that the target's own noise picks from the head's law."""

        def rule(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
            picked = []
            for begin in range(0, len(logits), CHUNK):
                some = slice(begin, begin + CHUNK)
                scaled = F.pad(logits[some].float() / temperature, (0, 1), value=-torch.inf)
                scaled = scaled[:, self.t2d].contiguous()  # [rows, vocab]
                picked.append(self.ops.gumbel_argmax(scaled, seeds[some], positions[some], STREAM_SAMPLE))
            return torch.cat(picked)

        return rule

    @torch.no_grad()
    def _walk(self, weights: Weights, texts: Sequence[Text], max_len: int, rule: Rule) -> Acceptance:
        stood = np.zeros(self.drafts, np.int64)
        steps = committed = 0
        for text in texts:
            hits = self._hits(weights, text, max_len, rule)
            done, newest, last = 0, text.prompt_length, min(len(text.tokens), max_len) - 1
            while newest < last:  # the token at `newest` is the newest the engine has
                right = hits[newest - 1, : last - newest]
                count = int(right.argmin()) if not right.all() else len(right)
                stood[:count] += 1
                newest += min(count + 1, last - newest)
                done += 1
            steps += done
            committed += max(0, last - text.prompt_length)
        rates = tuple(float(x) for x in stood / max(1, steps))
        return Acceptance(committed / max(1, steps), rates, steps)

    def _hits(self, weights: Weights, text: Text, max_len: int, rule: Rule) -> NDArray[np.bool_]:
        """[T, K]: whether the draft of step j from row p is the text's token p + 2 + j."""
        batch = Batch.of([text], max_len)
        tokens = torch.from_numpy(batch.tokens).to(self.d2t.device)
        length = int(batch.lengths[0])
        lesson = self.teacher(tokens, self.module.config.aux_layers)
        embeds = F.embedding(F.pad(tokens, (0, self.drafts)), self.teacher.embedding)
        outputs = self.module.unroll(weights, lesson.features, embeds, self.drafts)
        normed = self.module.normed(weights, outputs)[:, 0]  # [K, T, hidden]
        hits = np.zeros((tokens.shape[1], self.drafts), np.bool_)
        first = text.prompt_length - 1
        for step in range(self.drafts):
            rows = torch.arange(first, length - 2 - step, device=tokens.device)
            if not len(rows):
                break
            logits = F.linear(normed[step, rows], self.head)
            positions = rows + 2 + step - text.prompt_length
            drafts = rule(logits, torch.full_like(rows, text.seed), positions)
            right = drafts == tokens[0, rows + 2 + step]
            hits[first : first + len(rows), step] = right.cpu().numpy()
        return hits
