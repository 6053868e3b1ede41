"""Exactness on a GPU: every request compared with its plain run, and a control that must find differences.

bits: requests with n-gram and with random drafts, with and without overlap, in chunks and arriving midway,
compared with the plain batch; some compared with a run alone; and output tokens scored again as a prompt.
control: see there.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common.gpu_engine import Bench, params_of

from draftproof import LLM, SamplingParams
from draftproof.engine.engine import Engine
from draftproof.models import decoder
from draftproof.models.config import ModelConfig
from draftproof.models.load import load_config
from draftproof.outputs import RequestOutput
from draftproof.propose import Proposer
from draftproof.types import Draft, ProposeBatch

# A layer of an 8B model: for weights [4096, 4096] and [4096, 14336] cuBLAS splits K at few rows and not at
# many, so that the bits of a row depend on the number of rows. For weights of a small model it never splits.
SPLIT = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 4096, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "eos_token_id": 2,
}  # fmt: skip
MANY, FEW, LENGTH, DRAFTS = 64, 8, 64, 8  # requests, requests of a smaller batch, tokens of each, drafts
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows


class Junk(Proposer):
    """Random tokens, which are nearly all rejected."""

    sources = ("junk",)

    def propose(self, batch: ProposeBatch) -> Draft:
        draw = random.Random(sum(batch.lengths))
        vocab = self.env.vocab_size
        return Draft.from_lists([[draw.randrange(vocab) for _ in range(b)] for b in batch.budget], self.env.k)


def differing(left: Sequence[RequestOutput], right: Sequence[RequestOutput]) -> int:
    """Return how many tokens differ, in id or in any bit of a logprob."""
    wrong = 0
    for a, b in zip(left, right, strict=True):
        x, y = a.outputs[0], b.outputs[0]
        wrong += abs(len(x.token_ids) - len(y.token_ids))
        lines = zip(x.token_ids, x.logprobs or [], y.token_ids, y.logprobs or [], strict=False)
        wrong += sum((t, p) != (u, q) for t, p, u, q in lines)
    return wrong


def rescored(llm: LLM, done: Sequence[RequestOutput]) -> tuple[int, int]:
    """Return tokens, and tokens whose logprob differs from the one as a prompt token."""
    prompts = [o.prompt_token_ids + o.outputs[0].token_ids for o in done]
    scored = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=5), use_tqdm=False)
    count = wrong = 0
    for before, after in zip(done, scored, strict=True):
        tokens, lines = before.outputs[0].token_ids, before.outputs[0].logprobs or []
        again = (after.prompt_logprobs or [])[len(before.prompt_token_ids) :]
        count += len(tokens)
        wrong += sum(line[t] != other[t] for t, line, other in zip(tokens, lines, again, strict=True))
    return count, wrong


def bits(bench: Bench) -> dict[str, Any]:
    """Compare all kinds of runs with plain ones."""
    options, cases = bench.options, []
    total = {"tokens checked": 0, "tokens that differ": 0}
    tokens = min(options.tokens, options.bit_tokens)
    batches = options.batches
    plain: dict[Any, list[RequestOutput]] = {}

    def note(name: str, count: int, wrong: int) -> None:
        total["tokens checked"] += count
        total["tokens that differ"] += wrong
        cases.append(f"{name}: {wrong} of {count} differ")
        print(cases[-1], flush=True)

    few = max(1, max(batches) * 3 // 4)  # of the largest batch some arrive midway
    ways = (("ngram", False), (f"{__name__}:Junk", False), ("ngram", True))
    for method, midway in ways[: options.ways]:
        changes = {"max_num_seqs": few, "max_num_batched_tokens": 512} if midway else {}
        llm = bench.llm(method, **changes)
        for batch, heat in product(batches[-1:] if midway else batches, (0.0, 1.0)):
            prompts = bench.prompts("chat", batch)
            prompts[: batch // 2] = bench.prompts("copy", batch // 2)
            shared = {"temperature": heat, "logprobs": 5}
            if (batch, heat) not in plain:
                off = params_of(batch, tokens, speculative=False, **shared)
                plain[batch, heat] = llm.generate(prompts, off, use_tqdm=False)
                some = range(0, batch, max(1, batch // 2))
                alone = [llm.generate([prompts[i]], off[i], use_tqdm=False)[0] for i in some]
                note(f"batch {batch} T {heat} alone", len(alone) * tokens,
                     differing([plain[batch, heat][i] for i in some], alone))  # fmt: skip
                note(f"batch {batch} T {heat} scored again", *rescored(llm, plain[batch, heat]))
            ks = (3,) if midway else (1, 2, 5, 8) if method == "ngram" else (1, 4, 8)
            for k, overlap in product(ks, (True, False) if method == "ngram" else (False,)):
                if bench.is_time_up:
                    cases.append(f"batch {batch} T {heat} {method} k {k}: no time left")
                    continue
                llm.engine.loop.overlap = overlap
                drafted = params_of(batch, tokens, speculative={"num_speculative_tokens": k}, **shared)
                wrong = differing(plain[batch, heat], llm.generate(prompts, drafted, use_tqdm=False))
                what = f"{method} k {k} overlap {overlap}" + (" midway, chunks of 512" if midway else "")
                note(f"batch {batch} T {heat} {what}", batch * tokens, wrong)
    return {**total, "cases": cases, "passes": not total["tokens that differ"]}


# --- the control --------------------------------------------------------------------------------------------


def control(bench: Bench) -> dict[str, Any]:
    """Negative control: with cuBLAS at every row count the comparison of `bits` must find differences.

    Requests of a large plain batch are compared with small batches and with drafts: once with the kernels of
    the engine, where nothing may differ, and once with every product by cuBLAS. `Products` counts the
    products: if another kernel computed one of them, the control proves nothing, and fails.
    """
    bench.drop()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SPLIT))
        llm = LLM(
            folder, load_format="dummy", dtype="bfloat16", device=bench.options.device, max_num_seqs=MANY,
            max_model_len=256, max_num_batched_tokens=1024, kv_cache_tokens=MANY * 256,
            enable_prefix_caching=False,
            speculative_config={"method": f"{__name__}:Junk", "num_speculative_tokens": DRAFTS},
        )  # fmt: skip
    found: dict[str, Any] = {"tokens": 2 * MANY * LENGTH}
    found["differ as the engine is"] = against_itself(llm)
    use_cublas(llm.engine)
    with Products(llm.engine.ops).watched() as products:
        found["differ"] = against_itself(llm)
    found["products by others"], found["rows by cuBLAS"] = products.others, sorted(products.rows)
    # 8 and 64 requests, and 64 with 8 drafts each: cuBLAS computed all of them
    rows = all(any(low <= n <= high for n in products.rows) for low, high in ((1, 8), (33, 64), (513, 4096)))
    found["passes"] = (
        not found["differ as the engine is"] and found["differ"] > 0 and rows and not products.others
    )
    shapes = llm.engine.model_config, load_config(bench.options.model)[0]
    found["row counts of other bits, by shape"] = [by_shape(model, bench.options.device) for model in shapes]
    print("control", found, flush=True)
    return found


def against_itself(llm: LLM) -> int:
    """Return the differing tokens of batches of FEW, and of drafts, against MANY requests at once."""
    draw, vocab = random.Random(11), llm.engine.limits.vocab_size
    prompts = [[draw.randrange(3, vocab) for _ in range(16)] for _ in range(MANY)]
    shared = {"temperature": 1.0, "logprobs": 5}
    plain = params_of(MANY, LENGTH, speculative=False, **shared)
    fixed = {"num_speculative_tokens": DRAFTS, "adaptive": False}
    whole = llm.generate(prompts, plain, use_tqdm=False)
    few = [
        one
        for i in range(0, MANY, FEW)
        for one in llm.generate(prompts[i : i + FEW], plain[i : i + FEW], use_tqdm=False)
    ]
    drafted = llm.generate(prompts, params_of(MANY, LENGTH, speculative=fixed, **shared), use_tqdm=False)
    return differing(whole, few) + differing(whole, drafted)


def use_cublas(engine: Engine) -> None:
    """Use cuBLAS for every product at every row count, from the next step on."""
    ops: Any = engine.ops
    ops.forward.cublas.mode = "always"
    ops.forward.one_launch = False  # all layers in one kernel, which has products of its own
    engine.loop.device.graphs.captured.clear()  # captured graphs have the kernels of before


class Products:
    """Counter of the products of a pass: four a layer, and one for logits, each of all its rows.

    Products are counted where layers and products are called, not in kernels: a new kernel that computes a
    product in place of cuBLAS is noticed.
    """

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.rows: Counter[int] = Counter()  # of a product -> products by cuBLAS
        self.others = 0  # products that cuBLAS did not compute

    @contextmanager
    def watched(self) -> Iterator[Products]:
        """Count the products in this context."""
        ops = self.ops
        multiply, run_layers, linear = ops.forward.cublas.multiply, decoder.run_layers, ops.forward.linear

        def count(x: Any, *rest: Any) -> None:
            self.rows[len(x)] += 1
            multiply(x, *rest)

        def all_layers(ops: Any, residual: Any, layers: Any, *rest: Any, **options: Any) -> Any:
            before = self.rows.total()
            out = run_layers(ops, residual, layers, *rest, **options)
            self.others += 4 * len(layers) - (self.rows.total() - before)
            return out

        def one(x: Any, *rest: Any) -> Any:
            before = self.rows[len(x)]
            out = linear(x, *rest)
            if self.rows[len(x)] == before:  # within `run_layers` it is counted there too
                self.others += 1
            return out

        ops.forward.cublas.multiply, decoder.run_layers, ops.forward.linear = count, all_layers, one
        try:
            yield self
        finally:
            decoder.run_layers = run_layers
            del ops.forward.cublas.multiply, ops.forward.linear  # the methods of their classes again


def by_shape(model: ModelConfig, device: str) -> dict[str, list[int]]:
    """Return by weight shape the row counts at which a row by cuBLAS differs from that among 1024."""
    wide, heads = model.hidden_size, model.num_heads * model.head_dim
    both = heads + 2 * model.num_kv_heads * model.head_dim
    inner = model.intermediate_size
    found = {}
    for shape in ((both, wide), (wide, heads), (2 * inner, wide), (wide, inner), (model.vocab_size, wide)):
        weight, x = (
            torch.randn(size, device=device).to(torch.bfloat16) for size in (shape, (1024, shape[1]))
        )
        whole = x @ weight.t()
        wrong = [n for n in COUNTS if not torch.equal(x[:n] @ weight.t(), whole[:n])]
        found["x".join(map(str, shape))] = wrong
    return found
