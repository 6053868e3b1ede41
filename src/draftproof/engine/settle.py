"""Settling a step: from tensors to what each request is told: tokens, logprobs, drafts, endings."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from draftproof.engine.commit import Committed
from draftproof.engine.scheduler import Entry
from draftproof.models.runner import Runner
from draftproof.types import DraftRecord, FinishReason, LogprobRow, Request, StepOutput, Windows
from draftproof.verify.logprobs import Wanted, logprob_rows
from draftproof.verify.sampler import Sampled

PROMPT_ROWS = 64  # logits rows held at once for prompt logprobs


class Settler:
    """Computes the logprobs that were asked for, of committed tokens alone, and builds the outputs."""

    def __init__(self, runner: Runner, sources: tuple[str, ...]) -> None:
        self.runner = runner
        self.ops = runner.ops
        self.sources = sources

    def settle(
        self,
        chosen: list[Entry],
        windows: Windows,
        logits: Tensor,
        sampled: Sampled,
        committed: Committed,
    ) -> list[StepOutput]:
        num_out = committed.num_out.tolist()
        tokens = [line[:n] for line, n in zip(sampled.verdict.tokens.tolist(), num_out, strict=True)]
        accepted = torch.minimum(sampled.verdict.num_accepted, committed.num_out).tolist()
        first, stopped, full = (
            windows.first.tolist(),
            committed.stopped.tolist(),
            committed.full.tolist(),
        )
        logprobs = self._logprobs(chosen, first, tokens, logits, sampled.processed)
        drafts = self._drafts(chosen, windows, first, accepted, logits, sampled.processed)
        outputs = []
        for b, entry in enumerate(chosen):
            request = entry.sequence.request
            finish, reason = _ending(request, tokens[b], stopped[b], full[b])
            error = sampled.errors.get(first[b] + num_out[b]) if finish is None else None
            if error is not None and num_out[b] > sampled.verdict.num_accepted[b]:
                error = None  # the failed row lies beyond what was committed
            outputs.append(
                StepOutput(
                    request_id=request.id,
                    token_ids=tokens[b],
                    logprobs=logprobs[b],
                    prompt_logprobs=None,
                    num_draft=entry.num_draft,
                    num_accepted=accepted[b],
                    sources=self._sources(windows, b, accepted[b]),
                    drafts=drafts[b],
                    finish_reason="error" if error else finish,
                    stop_reason=reason,
                    error=error,
                )
            )
        return outputs

    def _logprobs(
        self,
        chosen: list[Entry],
        first: list[int],
        tokens: list[list[int]],
        logits: Tensor,
        processed: Tensor,
    ) -> list[list[LogprobRow] | None]:
        out: list[list[LogprobRow] | None] = [None] * len(chosen)
        for mode, source in (("raw", logits), ("processed", processed)):
            mine = [
                b
                for b, entry in enumerate(chosen)
                if entry.sequence.request.params.wants_logprobs
                and entry.sequence.request.params.logprobs_mode == mode
            ]
            wanted = [
                Wanted(
                    rows=list(range(first[b], first[b] + len(tokens[b]))),
                    tokens=tokens[b],
                    top=_top(chosen[b].sequence.request.params.logprobs, logits.shape[1]),
                    ids=tuple(chosen[b].sequence.request.params.logprob_token_ids or ()),
                )
                for b in mine
            ]
            for b, lines in zip(mine, logprob_rows(self.ops, source, wanted), strict=True):
                out[b] = lines
        return out

    def _sources(self, windows: Windows, b: int, count: int) -> list[str]:
        if not count:
            return []
        line = windows.columns.draft_source[windows.slots[b], :count]
        return [self.sources[i] for i in line.tolist()]

    def _drafts(
        self,
        chosen: list[Entry],
        windows: Windows,
        first: list[int],
        accepted: list[int],
        logits: Tensor,
        processed: Tensor,
    ) -> list[list[DraftRecord] | None]:
        """Every draft of the requests that asked, fallen ones included, with both sides' logprobs."""
        out: list[list[DraftRecord] | None] = []
        for b, entry in enumerate(chosen):
            request = entry.sequence.request
            if not request.params.include_draft_logprobs:
                out.append(None)
                continue
            n = entry.num_draft
            ids = windows.draft[b, :n].tolist()
            rows = list(range(first[b], first[b] + n))
            source = logits if request.params.logprobs_mode == "raw" else processed
            target = logprob_rows(self.ops, source, [Wanted(rows, ids, 0, ())])[0]
            own = windows.columns.draft_logprob[windows.slots[b], :n].tolist()
            start = entry.sequence.length - len(request.prompt_token_ids)
            out.append(
                [
                    DraftRecord(
                        token_id=ids[i],
                        position=start + i,
                        source=name,
                        accepted=i < accepted[b],
                        draft_logprob=None if own[i] != own[i] else own[i],
                        target_logprob=target[i].logprobs[0],
                    )
                    for i, name in enumerate(self._sources(windows, b, n))
                ]
            )
        return out

    # --- prompt logprobs --------------------------------------------------------------------------

    def prompt_logprobs(self, entries: list[Entry], first: list[int], hidden: Tensor) -> list[StepOutput]:
        """Row at position i decides prompt token i + 1; the last prompt row decides the first output."""
        outputs = []
        for entry, begin in zip(entries, first, strict=True):
            sequence = entry.sequence
            params, prompt = sequence.request.params, sequence.request.prompt_token_ids
            count = min(entry.num_rows, len(prompt) - 1 - sequence.computed)
            if params.prompt_logprobs is None or count <= 0:
                continue
            lines: list[LogprobRow] = []
            for start in range(0, count, PROMPT_ROWS):
                size = min(PROMPT_ROWS, count - start)
                logits = self.runner.logits(hidden[begin + start : begin + start + size])
                at = sequence.computed + start + 1
                ids = [int(token) for token in prompt[at : at + size]]
                top = _top(params.prompt_logprobs, logits.shape[1])
                wanted = Wanted(list(range(size)), ids, top, ())
                lines.extend(logprob_rows(self.ops, logits, [wanted])[0])
            outputs.append(
                StepOutput(
                    request_id=sequence.request.id,
                    token_ids=[],
                    logprobs=None,
                    prompt_logprobs=lines,
                    num_draft=0,
                    num_accepted=0,
                    sources=[],
                    drafts=None,
                )
            )
        return outputs

    @staticmethod
    def join(prompt: StepOutput | None, result: StepOutput) -> StepOutput:
        """One output a request and step: the prompt's last logprobs travel with the first token."""
        if prompt is None:
            return result
        return dataclasses.replace(result, prompt_logprobs=prompt.prompt_logprobs)


def _top(asked: int | None, vocab: int) -> int:
    return vocab if asked == -1 else min(asked or 0, vocab)


def _ending(
    request: Request, tokens: list[int], stopped: bool, full: bool
) -> tuple[FinishReason | None, int | None]:
    """End-of-text has no stop_reason; a stop token is its own."""
    if stopped:
        end = tokens[-1]
        is_eos = end in request.eos_token_ids and not request.params.ignore_eos
        return "stop", None if is_eos and end not in request.params.stop_token_ids else end
    return ("length" if full else None), None
