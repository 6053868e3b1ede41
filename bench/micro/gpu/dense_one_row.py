"""Times the layers of a dense model at one row on a GPU, as separate ops and in one kernel, with their bits.

    PYTHONPATH=src:tests/support:tests python bench/micro/gpu/dense_one_row.py
        [--shapes gemma-3-4b,llama-3-8b,qwen3-8b,qwen2.5-7b] [--contexts 60,150,300,1000]
        [--table-tokens 2048] [--seconds 100]

Every case is a graph of passes over layers that exceed the L2 cache. One line per case: µs a layer, and the
share of the memory floor at 4.8 TB/s. The last line of stdout is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/
sys.path.insert(0, str(Path(__file__).parent))

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common.measure import finish
from common.shapes import SHAPES
from op_checks import GPU, randn, rope
from op_times import micros
from torch import Tensor

from draftproof.models.layers import run_layers
from draftproof.ops import Attention, AttentionShape, Layer, Mlp, Rows
from draftproof.ops.triton.backend import TritonOps
from draftproof.ops.triton.compile_ahead import compile_ahead

BF16, PAGE, EPS, LAYERS = torch.bfloat16, 16, 1e-6, 6
BYTES_PER_US = 4.8e6  # of memory


def make_layers(ops: TritonOps, name: str) -> list[Layer]:
    """Return layers of a shape with random weights; five of six have a window if the model has windows."""
    raw = SHAPES[name]
    hidden, inner, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    num_q, num_kv = raw["num_attention_heads"], raw["num_key_value_heads"]
    is_gemma, qkv = raw["model_type"].startswith("gemma3"), (num_q + 2 * num_kv) * dim

    def packed(columns: int, depth: int, bias: Tensor | None = None) -> Any:
        weight = torch.empty((columns, depth), dtype=BF16, device=GPU).normal_(0, depth**-0.5)
        return ops.forward.pack_linear(weight, bias)

    def norm(size: int) -> Tensor:
        return torch.ones(size, dtype=BF16, device=GPU)

    made = []
    for i in range(LAYERS):
        window = raw.get("sliding_window", 0) if i + 1 < LAYERS else 0
        heads = AttentionShape(num_q, num_kv, dim, dim**-0.5, window)
        bias = torch.zeros(qkv, dtype=BF16, device=GPU) if raw["model_type"] == "qwen2" else None
        head_norms = (norm(dim), norm(dim)) if is_gemma or raw["model_type"] == "qwen3" else ()
        output_norms = (norm(hidden), norm(hidden)) if is_gemma else ()
        attention = Attention(heads, packed(qkv, hidden, bias), packed(hidden, num_q * dim), *head_norms)
        mlp = Mlp(packed(2 * inner, hidden), packed(hidden, inner), "gelu_tanh" if is_gemma else "silu")
        made.append(Layer(norm(hidden), attention, norm(hidden), mlp, *output_norms))
    return made


def layer_bytes(layer: Layer) -> int:
    """Return the bytes of the weights of a layer."""
    assert isinstance(layer.mlp, Mlp)
    packed = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    return sum(each.weight.nbytes for each in packed)


class Passes:
    """Passes of one row over the layers of a shape."""

    def __init__(self, ops: TritonOps, name: str, max_tokens: int) -> None:
        self.ops, self.name, self.layers = ops, name, make_layers(ops, name)
        heads = self.layers[0].attention.heads
        tables = {window > 0: rope(heads, max_tokens) for window in (0, 1)}
        self.ropes = [tables[layer.attention.heads.window > 0] for layer in self.layers]
        self.pages = 1 + torch.arange(max_tokens // PAGE, dtype=torch.int32, device=GPU)[None]
        shape = (2, self.pages.numel() + 1, PAGE, heads.num_kv, heads.dim)
        self.caches = [torch.empty(shape, dtype=BF16, device=GPU).normal_() for _ in self.layers]
        self.x = randn(1, self.layers[0].attention.out.columns, seed=1, dtype=BF16)

    def rows(self, context: int) -> Rows:
        """Return the row at position `context`."""
        slot = torch.zeros(1, dtype=torch.int64, device=GPU)
        index = self.pages[:, context // PAGE].long() * PAGE + context % PAGE
        return Rows(slot, slot + context, slot, index, self.pages)

    def separate(self, rows: Rows) -> tuple[Tensor, ...]:
        """Run separate ops."""
        last = self.layers[-1].mlp_norm
        return run_layers(
            self.ops, self.x.clone(), self.layers, last, rows, self.ropes, self.caches, EPS, fused=False
        )

    def kernel(self, rows: Rows) -> tuple[Tensor, ...]:
        """Run one kernel, and the last norm."""
        x, last = self.x.clone(), self.layers[-1].mlp_norm
        assert last is not None
        assert self.ops.forward._fused_dense(x, self.layers, rows, self.ropes, self.caches, EPS) is not None
        return self.ops.forward.rms_norm(x, last, EPS), x


def measure(passes: Passes, context: int) -> dict[str, Any]:
    """Return µs a layer as separate ops and in one kernel, in turn, and whether the bits are equal."""
    rows = passes.rows(context)
    runs: dict[str, Callable[[], Any]] = {
        "separate ops": partial(passes.separate, rows),
        "one kernel": partial(passes.kernel, rows),
    }
    found = [run() for run in runs.values()]
    line: dict[str, Any] = {"equal bits": all(map(torch.equal, *found))}
    floor = layer_bytes(passes.layers[0]) / BYTES_PER_US
    for label, run in runs.items():
        line[label] = round(micros([run] * 3, 15) / LAYERS, 2)
    line["floor"], line["share of floor"] = round(floor, 2), round(floor / line["one kernel"], 3)
    return line


def main() -> None:
    """Compile all kernels side by side, then check and time them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="gemma-3-4b,llama-3-8b,qwen3-8b,qwen2.5-7b")
    parser.add_argument("--contexts", default="60,150,300,1000")
    parser.add_argument("--table-tokens", type=int, default=2048, help="tokens of the page table")
    parser.add_argument("--seconds", type=float, default=100)
    options = parser.parse_args()
    begin, ops = time.monotonic(), TritonOps(GPU)
    every = [Passes(ops, name, options.table_tokens) for name in options.shapes.split(",")]
    contexts = [int(context) for context in options.contexts.split(",")]
    calls = [partial(run, each.rows(contexts[0])) for each in every for run in (each.separate, each.kernel)]
    compile_ahead(calls, lambda *_: None)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for passes in every:
        for context in contexts:
            if time.monotonic() - begin > options.seconds:
                break
            line = measure(passes, context)
            found.setdefault(passes.name, {})[str(context)] = line
            print(f"{passes.name}, {context} tokens: {line}", flush=True)
    finish("dense_one_row", {"cases": found})


if __name__ == "__main__":
    main()
