"""Contract of the sampling ops: logits processing, sampling with keyed noise, logprobs.

Noise of (seed, position, stream, id): Philox-4x32-10 with key = (seed low 32, seed high 32) and counter =
(id // 4, position, stream, 0); word id % 4 is x; u = (x + 0.5) * 2^-32 in fp64, gumbel =
float32(-log(-log1p(-u))). It lies in [-3.2, 22.9].

No op waits for the device, and shapes do not depend on the data, so a step can be captured. A row with slot
-1 is padding: it changes nothing, and nothing is read for it. `V` is the vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from draftproof.ops.contract.types import DraftVocab, NamedIds, TokenLogprobs
from draftproof.types import Windows

# Streams keep draws for different purposes independent although seed and position are the same.
STREAM_SAMPLE = 0  # the token at a position; a drafter that samples uses the same noise on purpose
STREAM_ACCEPT = 1  # rejection sampling: accept this draft or not
STREAM_RESIDUAL = 2  # rejection sampling: the token in place of a rejected draft
STREAM_SYNTHETIC = 3  # synthetic acceptance, for benchmarks


class SamplingOps(ABC):
    """Op family on rows of logits."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Return the best id [R] int64 of logits [R, V]; the lowest id wins a tie.

        The result of a row with NaN is undefined.
        """

    @abstractmethod
    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        """Return the argmax [R] over ids of fp32(scaled [R, V] + gumbel); seeds, positions [R] int64."""

    @abstractmethod
    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        """Return u of id 0 as fp64 in (0, 1): [R]."""

    @abstractmethod
    def logsumexp(self, logits: Tensor) -> Tensor:
        """Return log(sum(exp(logits))) [R] fp32 of logits [R, V] fp32; -inf entries add nothing."""

    @abstractmethod
    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the rank [R] int64, from 1, of ids [R] in the order (value down, id up)."""

    @abstractmethod
    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return values and ids [R, k] of the first k of each row in the order (value down, id up)."""

    @abstractmethod
    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """Return a copy of scaled [R, V] with -inf outside top-k, then top-p, then min-p; [R] each.

        In the order (value down, id up): top_k keeps the first k (0 = all); top_p keeps a token while the
        probability mass before it, renormalised after top_k, is below top_p (1 = all); min_p keeps a token
        whose probability is at least min_p times the best one's (0 = all).
        """

    def process_logits(self, base: Tensor, windows: Windows) -> Tensor:
        """Apply temperature, top-k, top-p and min-p to base [L, V]; greedy rows stay as they are."""
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        temperature = columns.temperature[slot]
        sampled = temperature > 0
        scaled = base / torch.where(sampled, temperature, 1.0)[:, None]
        top_k = torch.where(sampled, columns.top_k[slot], 0)
        top_p = torch.where(sampled, columns.top_p[slot], 1.0)
        return self.truncate(scaled, top_k, top_p, torch.where(sampled, columns.min_p[slot], 0.0))

    @abstractmethod
    def apply_penalties(self, logits: Tensor, windows: Windows) -> Tensor:
        """Return a copy of logits [L, V] with penalties, then bias, of each row's slot.

        `LogitAdjust` flags of the slot select what is applied. The drafts before the row count as committed.
        Repetition covers prompt and output: the logit of a token seen is divided by the penalty if positive,
        multiplied if not. Then frequency times the count in the output, and presence, are subtracted.
        """

    @abstractmethod
    def apply_bans(self, base: Tensor, windows: Windows) -> None:
        """Write -inf to base [L, V] at banned tokens, and at end tokens of rows below min_length."""

    @abstractmethod
    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        """Write -inf to base [L, V] at tokens that the grammar of the row's slot does not allow.

        windows.allowed holds the masks by slot and depth: bit t % 32 of word t // 32 for token t.
        """

    @abstractmethod
    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        """Sample one token per row of [L, V]; return tokens and error codes, [L] int64 each.

        Greedy rows take argmax; others take gumbel_argmax of logits / temperature (of the logits as they are
        if `scaled`) with the slot's seed and the row's position, STREAM_SAMPLE. The code is
        FinishStatus.NO_ALLOWED_TOKEN where all logits are -inf, FinishStatus.NOT_FINITE where one is NaN or
        +inf, else 0. The token is 0 where the code is not 0; padding has 0 for both. Both are valid until the
        next call.
        """

    @abstractmethod
    def logprobs(
        self,
        logits: Tensor,
        rows: Tensor,
        tokens: Tensor,
        top: int,
        out: TokenLogprobs | None = None,
        named: NamedIds | None = None,
    ) -> TokenLogprobs:
        """Return logit - logsumexp of tokens [N] at logits rows [N] (-1: padding) and of the `top` best.

        With `named` also the logprobs and ranks of M = `named.width` ids of the row's slot. The result is
        written to the tensors of `out`, if given, which then has `named` where the argument is given.
        """

    def draft_logprobs(
        self,
        logits: Tensor,
        slots: Tensor,
        drafts: Tensor,
        top: int,
        out: TokenLogprobs,
        *,
        kind: tuple[Tensor, int] | None = None,
        temperature: Tensor | None = None,
        vocab: DraftVocab | None = None,
    ) -> None:
        """Write the logprobs of drafts [J, B] at logits rows [J * B, N], as `logprobs`, to `out`.

        There is no draft where it or its slot [J, B] is negative; values are NaN then, ids and rank 0.
        kind: a column [S] and a value; slots with another value have no draft. temperature [S]: divide a row
        by that of its slot unless it is 0. vocab: of the N columns; drafts and ids are of the target.
        """
        slot, draft = slots.reshape(-1), drafts.reshape(-1)
        line, is_real = slot.clamp(min=0), (slot >= 0) & (draft >= 0)
        if kind is not None:
            is_real = is_real & (kind[0][line] == kind[1])
        if temperature is not None:
            given = temperature[line]
            logits = logits / torch.where(given > 0, given, 1.0)[:, None]
        draft = draft.clamp(min=0)
        if vocab is not None:
            draft = vocab.places[draft]
            is_real, draft = is_real & (draft >= 0), draft.clamp(min=0)
        rows = torch.where(is_real, torch.arange(len(slot), device=slot.device), -1)
        self.logprobs(logits, rows, draft, top, out)
        if vocab is not None:
            out.ids.copy_(vocab.ids[torch.where(is_real[:, None], out.ids, 0)])
        out.values.masked_fill_(~is_real[:, None], math.nan)
        out.ids.masked_fill_(~is_real[:, None], 0)
        out.ranks.masked_fill_(~is_real, 0)
