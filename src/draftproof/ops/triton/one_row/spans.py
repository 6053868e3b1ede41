"""Spans of keys in the attention of one row: blocks in the ring, and the merge of stored spans.

Numerics are those of `attention/online_softmax.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from draftproof.ops.triton.attention.kv_rings import finite
from draftproof.ops.triton.one_row.ring import BF16, CHUNK

KEYS = gl.constexpr(64)  # keys of a block; see `online_softmax.KEYS`
SPAN = gl.constexpr(128)  # tokens of a span; see `online_softmax.SPAN`
HEAD_ROWS = gl.constexpr(16)  # at most: the query heads of a KV head, its key and its value
FEW_SPANS = gl.constexpr(2)  # spans that one item computes in turn: cheaper than a merge between programs
MERGED_SPANS = gl.constexpr(4)  # spans of a step of the merge, whose loads overlap
# Layout of a block of keys, of 8 rows of a chunk, and of the columns of a merge.
BLOCK_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
ATOM_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
COLUMNS_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def replace_row(ring, stage, row, lines, first, D: gl.constexpr):
    """Replace row `row` of the block [KEYS, D] of a stage by the lines [CHUNK] from `first` on.

    Only the atom of the swizzled layout that contains the row is read and written: 8 rows of a chunk.
    """
    ATOM: gl.constexpr = 8
    ATOMS: gl.constexpr = KEYS // ATOM  # of a chunk
    shape: gl.constexpr = [ring.shape[0] * (D // CHUNK) * ATOMS, ATOM, CHUNK]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ATOM, CHUNK], BF16)
    atoms = ring._reinterpret(BF16, shape, layout)
    is_row = (gl.arange(0, ATOM, layout=gl.SliceLayout(1, ATOM_LAYOUT)) == row % ATOM)[:, None]
    for chunk in range(D // CHUNK):
        atom = atoms.index((stage * (D // CHUNK) + chunk) * ATOMS + row // ATOM)
        old = atom.load(ATOM_LAYOUT)
        new, _ = gl.broadcast(lines.index(first + chunk).load(gl.SliceLayout(0, ATOM_LAYOUT))[None, :], old)
        atom.store(gl.where(is_row, new, old))


@gluon.jit
def merge_factors(m, m_new):
    """Return the maximum of two partial results and their factors; see `online_softmax.merge_partials`."""
    top = gl.maximum(m, m_new)
    base = finite(top)
    return top, gl.exp2(m - base), gl.exp2(m_new - base)


@gluon.jit
def merge_spans(parts, stats, out, num_spans, spans, COLUMNS: gl.constexpr, D: gl.constexpr):
    """Merge all spans of the COLUMNS columns of this program, of one head."""
    head = gl.program_id(0) * COLUMNS // D
    column = gl.program_id(0) * COLUMNS % D + gl.arange(0, COLUMNS, layout=COLUMNS_LAYOUT)
    parts += head * spans * D + column
    stats += head * spans * 2
    m = gl.full([COLUMNS], float("-inf"), gl.float32, COLUMNS_LAYOUT)
    total = gl.zeros([COLUMNS], gl.float32, COLUMNS_LAYOUT)
    acc = gl.zeros([COLUMNS], gl.float32, COLUMNS_LAYOUT)
    for first in range(0, num_spans, MERGED_SPANS):
        loaded = ()
        for s in gl.static_range(MERGED_SPANS):
            exists = column * 0 + first + s < num_spans
            at = stats + (first + s) * 2 + column * 0
            m1 = gl.load(at, mask=exists, other=float("-inf"), cache_modifier=".cg")
            total1 = gl.load(at + 1, mask=exists, other=0.0, cache_modifier=".cg")
            acc1 = gl.load(parts + (first + s) * D, mask=exists, other=0.0, cache_modifier=".cg")
            loaded = loaded + ((m1, total1, acc1),)
        for s in gl.static_range(MERGED_SPANS):
            m, a, b = merge_factors(m, loaded[s][0])
            total = total * a + loaded[s][1] * b
            acc = acc * a + loaded[s][2] * b
    gl.store(out + head * D + column, (acc / total + 0.0).to(BF16))
