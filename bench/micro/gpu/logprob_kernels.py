"""The two kernels behind logprobs, in the forms they can have; the last line of stdout is JSON.

    python bench/micro/gpu/logprob_kernels.py [--rows 64 256 512] [--tops 0 8 32] [--device cpu --vocab 500]

Microseconds of the whole op (`scan` and `finish`) in a graph of twenty, by how many warps finish a row
(WARPS), how many ids a group has (GROUP), and how many programs `scan` may have (PROGRAMS). What each form
gives must be what the first one gives, to the bit; `picked`: the share of the rows that is not padding. On
the CPU, with TRITON_INTERPRET=1, it shows that alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/

import argparse
from itertools import product
from typing import Any

import torch
from common.measure import finish

from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.sampling import logprobs

REPEATS = 20
USUAL = {name: getattr(logprobs, name) for name in ("WARPS", "GROUP", "PROGRAMS")}
CHANGES: list[dict[str, int]] = [
    {},
    {"WARPS": 2},
    {"WARPS": 4},
    {"WARPS": 8},
    {"GROUP": 128},
    {"GROUP": 128, "WARPS": 8},
    {"GROUP": 128, "WARPS": 16},
    {"PROGRAMS": 6144},
]


def case(rows: int, vocab: int, picked: float, device: torch.device) -> tuple[torch.Tensor, ...]:
    """logits [rows, vocab], picked rows and tokens [rows]."""
    draw = torch.Generator(device=device).manual_seed(rows)
    logits = 3 * torch.randn((rows, vocab), generator=draw, device=device)
    at = torch.arange(rows, device=device)
    return logits, torch.where(at < picked * rows, at, -1), logits.argmax(1)


def microseconds(ops: TritonOps, given: Any, top: int) -> float:
    graph = ops.runtime.graph(lambda: [ops.sampling.logprobs(*given, top) for _ in range(REPEATS)][-1])
    return 1e6 * ops.runtime.seconds(graph, times=20) / REPEATS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--tops", type=int, nargs="+", default=[0, 8, 32])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    ops, found = TritonOps(torch.device(options.device)), []
    for rows, picked, top in product(options.rows, (1.0, 0.7), options.tops):
        given, want = case(rows, options.vocab, picked, ops.device), None
        live = int(picked * rows)
        for change in CHANGES:
            for name, value in {**USUAL, **change}.items():
                setattr(logprobs, name, value)
            got = ops.sampling.logprobs(*given, top)
            parts = [part[:live].clone() for part in (got.values, got.ids, got.ranks)]
            want = want or parts
            same = all(map(torch.equal, want, parts))
            us = round(microseconds(ops, given, top), 2) if ops.launch.cuda else None
            found.append({"rows": rows, "picked": picked, "top": top, **change, "us": us, "same": same})
            print(found[-1], flush=True)
    finish("logprob_kernels", {"found": found})


if __name__ == "__main__":
    main()
