"""Forward passes of a GPU, by rows: exact against fast numerics, and where the time goes.

    PYTHONPATH=src python bench/micro/gpu/forward_pass.py [--model small] [--layers 4]
        [--cases 64x1,prompts] [--table]

Random weights in the shape of SmolLM2-135M (small) and Llama-8B (large; --layers of its 32 are enough, a
layer is like the next). `BxN` is B sequences with N rows each at --context; `prompts` are whole prompts of
97 to 612 tokens, 2048 rows; `mixed` the same with 200 decode rows before them; a number is one prompt.
Microseconds of a CUDA graph, the memory's rate for a floor, and with --table what each kernel of a layer
takes (no early launch). JSON last.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from common.measure import commit
from op_times import CONFIG as SMALL

from draftproof.models.config import ModelConfig
from draftproof.models.decoder import DenseDecoder
from draftproof.models.weight_formats import read_weights
from draftproof.ops import Rows
from draftproof.ops.triton.backend import TritonOps

GPU = torch.device("cuda")
BF16 = torch.bfloat16
LENGTH, SLOTS, PAGE = 2304, 256, 16
LARGE = {
    "architecture": "LlamaForCausalLM", "vocab_size": 128256, "hidden_size": 4096, "num_heads": 32,
    "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 14336, "norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position": 8192, "tie_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
PROMPTS = (97, 350, 210, 612, 330, 449)  # 2048 rows
CASES = "1x1,1x6,8x6,64x1,64x6,256x1,prompts,mixed,2048,prompts8192"
LISTS = ("chunk_list_kernel", "tile_lists_kernel")  # of tiles, made once a pass
Part = tuple[int, int, int]  # slot, first position, rows


def case(name: str, context: int) -> list[Part]:
    if name == "mixed":
        return [(s, context, 1) for s in range(200)] + [(200 + s, 0, n) for s, n in enumerate(PROMPTS)]
    if name.startswith("prompts"):
        times = int(name.removeprefix("prompts") or 2048) // sum(PROMPTS)
        return [(s, 0, n) for s, n in enumerate(PROMPTS * times)]
    if name.isdigit():
        return [(0, 0, int(name))]
    sequences, rows = map(int, name.split("x"))
    return [(s, context, rows) for s in range(sequences)]


def weights(config: ModelConfig) -> dict[str, Tensor]:
    random = torch.Generator(device=GPU).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=GPU, dtype=BF16) * shape[-1] ** -0.5

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    one = torch.ones(hidden, device=GPU, dtype=BF16)
    found = {"model.embed_tokens.weight": normal(config.vocab_size, hidden), "model.norm.weight": one}
    if not config.tie_embeddings:
        found["lm_head.weight"] = normal(config.vocab_size, hidden)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = one
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
            found[f"{at}self_attn.{name}_proj.weight"] = normal(heads * dim, hidden)
        found[f"{at}self_attn.o_proj.weight"] = normal(hidden, config.num_heads * dim)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            found[f"{at}mlp.{name}_proj.weight"] = normal(*shape)
    return found


class ForwardBench:
    """Model with its KV caches and captured forward passes. Pages of a sequence are not in order."""

    def __init__(self, config: ModelConfig, ops: TritonOps, tensors: dict[str, Tensor], most: int) -> None:
        self.ops, self.model = ops, DenseDecoder(config, read_weights(tensors), ops, LENGTH)
        used = -(-most // PAGE)
        shape = (2, 1 + SLOTS * used, PAGE, config.num_kv_heads, config.head_dim)
        random = torch.Generator(device=GPU).manual_seed(3)
        self.caches = [
            torch.empty(shape, dtype=BF16, device=GPU).normal_(generator=random)
            for _ in range(config.num_layers)
        ]
        order = 1 + torch.randperm(SLOTS * used, generator=torch.Generator().manual_seed(4)).to(torch.int32)
        self.table = torch.zeros((SLOTS, LENGTH // PAGE), dtype=torch.int32, device=GPU)
        self.table[:, :used] = order.view(SLOTS, used).to(GPU)
        self.table[0] = order[: LENGTH // PAGE].to(GPU)  # a long one; it shares pages with the next few

    def graph(self, parts: list[Part]) -> Callable[[], Tensor]:
        slots = torch.cat([torch.full((n,), s) for s, _, n in parts]).to(GPU)
        positions = torch.cat([torch.arange(p, p + n) for _, p, n in parts]).to(GPU)
        index = self.table[slots, positions // PAGE].long() * PAGE + positions % PAGE
        tokens = (slots * 31 + positions * 7) % self.model.config.vocab_size
        rows = Rows(tokens, positions, slots, index, self.table)
        return self.ops.runtime.graph(lambda: self.model.forward(rows, self.caches))


def micros(call: Callable[[], Any], rounds: int = 5, each: int = 5) -> float:
    call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(each):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / each)
    return round(statistics.median(times), 1)


def table(call: Callable[[], Any], layers: int) -> dict[str, float]:
    """Microseconds of each kernel of a layer, in order; the list of tiles, made once a pass, is left out."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in kernels if "Mem" not in e.name and e.name not in LISTS]
    kernels.sort(key=lambda e: e.time_range.start)
    size = (len(kernels) - 2) // layers  # embedding and first norm come before
    body = kernels[2 : 2 + size * layers]
    return {
        f"{i} {body[i].name[:30]}": round(sum(e.time_range.elapsed_us() for e in body[i::size]) / layers, 1)
        for i in range(size)
    }


def read_rate() -> float:
    """TB/s of a plain reduction over 4 GiB."""
    data = torch.zeros(1 << 29, dtype=torch.int64, device=GPU)
    return round(data.numel() * 8 / micros(data.max, each=1) / 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small,large")
    parser.add_argument("--layers", type=int, default=4, help="of the large model")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = {"bench": "gpu_pass", "commit": commit(), "device": torch.cuda.get_device_name()}
    report["TB/s of a read"] = read_rate()
    for model in options.model.split(","):
        config = SMALL if model == "small" else ModelConfig(num_layers=options.layers, **LARGE)
        tensors = weights(config)
        for numerics in ("exact", "fast"):
            bench = ForwardBench(
                config, TritonOps(GPU, numerics=numerics), tensors, max(640, options.context + 16)
            )
            plain = ForwardBench(config, TritonOps(GPU, pdl=False), tensors, 640) if options.table else None
            for name in options.cases.split(","):
                parts = case(name, options.context)
                found = report.setdefault(model, {}).setdefault(name, {})
                found[numerics] = micros(bench.graph(parts))
                if plain is not None and numerics == "exact":
                    found["kernels"] = table(plain.graph(parts), config.num_layers)
                print(f"{model} {name} {numerics}: {found}", flush=True)
            del bench, plain
    print(json.dumps(report))


if __name__ == "__main__":
    main()
