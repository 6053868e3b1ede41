"""RMS norm of one row with the bits of `elementwise.py`: its reduction tree, continued over lines."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from draftproof.ops.triton import elementwise
from draftproof.ops.triton.one_row.ring import BF16, CHUNK, ROWS_LAYOUT, load_lines

tree_sum_rows = gluon.jit(elementwise.tree_sum_rows.fn)


@gluon.jit
def tree_sum(x):
    """Return the sum of x [N] by the same tree."""
    return gl.sum(tree_sum_rows(gl.reshape(x, [1, x.shape[0]])), axis=0)


@gluon.jit
def load_weight(weight, LENGTH: gl.constexpr):
    """Load the weight of a norm [LENGTH // CHUNK, CHUNK]; before a barrier, since it is not in the cache."""
    i = gl.arange(0, LENGTH // CHUNK, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    return gl.load(weight + i[:, None] * CHUNK + j[None, :])


@gluon.jit
def normed_lines(row, weight, eps, LENGTH: gl.constexpr):
    """Return the norm of a row of LENGTH elements with a loaded weight, as [LENGTH // CHUNK, CHUNK]."""
    x = load_lines(row, LENGTH).to(gl.float32)
    # each thread adds the sums of all lines, so that warps exchange values once
    sums = gl.convert_layout(tree_sum_rows(x * x), gl.BlockedLayout([LENGTH // CHUNK], [32], [4], [0]))
    scale = gl.rsqrt(tree_sum(sums) / LENGTH + eps)
    return ((x * scale).to(BF16).to(gl.float32) * weight.to(gl.float32)).to(BF16)
