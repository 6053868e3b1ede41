"""Inputs of the tests of kernels that run all layers on one row; see `ops/triton/one_row`."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.ops import Rows

PAGE, MAX_TOKENS = 16, 8192


def randn(*shape: int, seed: int) -> Tensor:
    """Return random bf16 numbers on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)


def make_rows(position: int, slot: int = 1) -> Rows:
    """Return a row of slot 1, whose pages are in random order; slot -1: padding."""
    pages = MAX_TOKENS // PAGE
    generator = torch.Generator().manual_seed(3)
    table = (1 + torch.randperm(2 * pages, generator=generator).to(torch.int32)).view(2, pages).cuda()

    def column(value: int) -> Tensor:
        return torch.tensor([value], device="cuda")

    index = int(table[1, position // PAGE]) * PAGE + position % PAGE
    return Rows(column(0), column(position), column(slot), column(index), table)
