"""The commit, the only place where a request's tokens and lengths change after it sat down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.types import Verdict, Windows


@dataclass(frozen=True, slots=True)
class Committed:
    """What was really committed, once ends inside the window are taken into account."""

    num_out: Tensor  # [B] int64
    stopped: Tensor  # [B] bool: the last committed token is an end or stop token
    full: Tensor  # [B] bool: max_length was reached and it did not stop


def commit(windows: Windows, verdict: Verdict, limit: Tensor) -> Committed:
    """Append each window's tokens up to its first end token, its max_length and `limit` [B]."""
    columns, slots = windows.columns, windows.slots
    length = windows.length
    depth = torch.arange(verdict.tokens.shape[1], device=slots.device)
    ends = (verdict.tokens[:, :, None] == columns.stop_ids[slots][:, None, :]).any(-1)
    ends &= depth < verdict.num_out[:, None]
    before_end = (~ends).long().cumprod(1).sum(1)  # tokens before the first end token
    room = columns.max_length[slots] - length
    num_out = torch.minimum(verdict.num_out, before_end + 1)
    num_out = torch.minimum(torch.minimum(num_out, room), limit)
    kept = depth < num_out[:, None]
    at = (slots[:, None] * columns.tokens.shape[1] + length[:, None] + depth)[kept]
    columns.tokens.view(-1)[at] = verdict.tokens[kept]
    columns.length[slots] = length + num_out
    columns.computed[slots] = length + num_out - 1
    columns.num_draft[slots] = 0
    stopped = before_end < num_out
    return Committed(num_out, stopped, ~stopped & (num_out == room))
