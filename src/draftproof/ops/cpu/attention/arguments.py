"""Arguments of the attention kernels, as int64 words."""

from __future__ import annotations

from collections import namedtuple

from draftproof.ops.cpu.jit.compile import inlined, load_i64

Arguments = namedtuple(
    "Arguments",
    "out q positions slots page_table cache workspace workspace_bytes num_q num_kv dim window num_slots "
    "max_pages num_pages page_size scale out_dim values sinks",
)
ARG = Arguments(*range(20))  # indices of the kernels' int64 arguments


@inlined
def arg(args: int, place: int) -> int:
    """Return an argument of the kernel."""
    return load_i64(args + 8 * place)
