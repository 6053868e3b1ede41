"""What a head's drafts cost: K rounds behind a step against the step itself, and the floor from bytes moved.

    python bench/rounds.py [--model FOLDER --load-format dummy] [--head FOLDER] [--batches 1,8,64,256] [--k 4]

Without --model the target has the shape of SmolLM2-135M, without --head there is a one-layer EAGLE-3 head
for it with `--vocab` draft ids; both have random weights, which cost as much as trained ones. Every request
has `--context` tokens. Times are medians of replays of the engine's own captured steps, put back to the same
state before each:

    plain     a step of one row a request         step      the step that verifies K drafts of each
    drafts    the K rounds behind that step       keeping   what follows a plain step when nobody may draft

`share` is drafts / plain. The floor of the drafts: the head's weights and its LM head once a round, the layer
that joins features once, K and V of all tokens before, at the bandwidth of a large copy measured here. What
is small enough to stay in the second-level cache from round to round can be under it. `--check` compares
drafts, K and V with the ops one by one, bit by bit. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import finish
from safetensors.torch import save_file
from torch import Tensor

from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.engine.engine import Engine
from draftproof.models.config import ModelConfig
from draftproof.models.head import HeadConfig, Target
from draftproof.models.load import Checkpoint, load_checkpoint
from draftproof.ops import Ops
from draftproof.ops.bookkeeping import Bookkeeping
from draftproof.propose.head import HeadProposer
from draftproof.sampling_params import SamplingParams
from draftproof.types import DraftTraits, Request, Traits

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, intermediate_size=1536, norm_eps=1e-5, rope_theta=100000.0,
    max_position=8192, tie_embeddings=True, eos_token_ids=(2,),
)  # fmt: skip


def checkpoint(options: argparse.Namespace) -> Checkpoint:
    source = options.model or SMOLLM2
    how = {} if options.model and options.load_format == "auto" else {"load_format": options.load_format}
    if not options.model:
        how = {"load_format": "dummy"}
    return load_checkpoint(source, dtype="bfloat16", progress=False, **how)


def dummy_head(made: Checkpoint, vocab: int, folder: Path) -> str:
    """A head of one layer with the widths of its model, over every (V / vocab)-th id."""
    model, random = made.config, torch.Generator().manual_seed(1)
    layers = model.num_layers
    config = HeadConfig(
        kind="eagle3",
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        aux_layers=tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)})),
        draft_vocab_size=min(vocab, model.vocab_size),
        target=Target.of(model, made.tensors),
    )
    tensors: dict[str, Tensor] = {}
    for name, shape in config.tensors().items():
        tensors[name] = (torch.randn(shape, generator=random) / math.sqrt(shape[-1])).to(torch.bfloat16)
        if "norm" in name:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        if name == "d2t":
            tensors[name] = torch.arange(shape[0]) * (model.vocab_size // shape[0])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return str(folder)


class Decoding:
    """An engine whose requests all decode, and its captured steps."""

    def __init__(self, options: argparse.Namespace, batch: int, head: str, made: Checkpoint) -> None:
        k, room = options.k, options.context + 64
        spec = {"method": options.method, "model": head, "num_speculative_tokens": k, "adaptive": False}
        config = EngineConfig(
            model="bench", device=options.device, backend=options.backend, max_model_len=room,
            max_num_seqs=batch, kv_cache_tokens=batch * room, enable_prefix_caching=False, warm_up=False,
            max_num_batched_tokens=max(512, batch * (k + 1)), speculative=SpeculativeConfig.parse(spec),
        )  # fmt: skip
        self.engine = Engine(config, made)
        params = SamplingParams(temperature=options.temperature, max_tokens=60, ignore_eos=True)
        random, vocab = torch.Generator().manual_seed(2), made.config.vocab_size
        for i in range(batch):
            ids = torch.randint(vocab, (options.context,), generator=random).tolist()
            self.engine.add(Request(id=str(i), prompt_token_ids=ids, params=params, seed=i))
        self.device, self.batch, self.k = self.engine.loop.device, batch, k
        columns = self.device.slots.columns
        while int((columns.length > options.context).sum()) < batch:
            self.engine.step()
        for _ in range(2):
            self.engine.step()
        failure = self.device.drafting.failure
        if failure is not None:
            raise failure
        drafter = self.device.drafting.proposer
        assert isinstance(drafter, HeadProposer)
        self.drafter = drafter
        names = ("length", "computed", "num_draft", "ended", "draft", "tokens")
        self._state = {name: getattr(columns, name).clone() for name in names}
        self._plan = self.device._plan.clone()
        self._plan[2, :batch], self._plan[3, :batch] = k, k  # drafts that are verified, and given

    def put_back(self, drafts: int) -> None:
        columns = self.device.slots.columns
        for name, held in self._state.items():
            getattr(columns, name).copy_(held)
        columns.num_draft[: self.batch] = drafts
        self.device._plan.copy_(self._plan)
        self.device._plan[2:, : self.batch] = drafts
        self.device._sent = None

    def parts(self, drafts: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The step that verifies so many drafts of each, and the drafts behind it."""
        device, ops = self.device, self.engine.ops
        rows, entries = ops.bucket(self.batch * (1 + drafts)), min(ops.bucket(self.batch), self.batch)
        traits = Traits((0,))
        step = device._graph(("decode", rows, traits), partial(device._whole, rows, traits))
        return step, device._drafts(rows, entries, DraftTraits(drafts))

    def times(self, drafts: int, repeat: int) -> tuple[float, float]:
        """Microseconds of a step and of the drafts behind it."""
        parts, found = self.parts(drafts), []
        for _ in range(repeat + 3):
            with self.engine.ops.stepping():
                self.put_back(drafts)
                found.append(clocked(self.engine.ops, parts))
        return tuple(statistics.median(column) for column in list(zip(*found, strict=True))[:2])

    def floor_bytes(self) -> int:
        """Of the drafts behind a step of full windows."""
        model, config = self.drafter.model, self.drafter.model.config
        layer = [
            (p.weight, p.bias) for one in model.layers for p in (one.qkv, one.out, one.gate_up, one.down)
        ]
        sizes = sum(t.nbytes for pair in layer for t in pair if t is not None)
        once = model.fc.weight.nbytes + self.batch * (1 + self.k) * model.fc.weight.shape[1] * 2
        context = int(self._state["length"][: self.batch].sum())
        stored = sum(cache[:, 0, 0].nbytes for cache in self.drafter.caches) * context
        rows = 4 * self.batch * config.hidden_size * 2
        return once + self.k * (sizes + model.head.weight.nbytes + stored + rows)

    def drafted(self) -> tuple[Tensor, list[Tensor]]:
        """Drafts and the head's storage after a step, op by op launched anew."""
        self.put_back(self.k)
        rows = self.engine.ops.bucket(self.batch * (1 + self.k))
        self.device._whole(rows, Traits((0,)))
        for cache in self.drafter.caches:
            cache.zero_()
        entries = min(self.engine.ops.bucket(self.batch), self.batch)
        layout = self.device._layout(rows, 0).rows
        self.device.drafting.draft(self.device.plan, layout, entries, DraftTraits(self.k))
        columns = self.device.slots.columns
        return columns.draft.clone(), [cache.clone() for cache in self.drafter.caches]

    def check(self) -> bool:
        """Is everything as with the ops one by one?"""
        ops, kind = self.engine.ops, type(self.engine.ops)
        mine, stored = self.drafted()
        held = {name: kind.__dict__.get(name) for name in ("blocks", "pick", "first_rows", "follow", "ahead")}
        try:
            kind.blocks, kind.first_rows = Ops.blocks, Ops.first_rows  # type: ignore[method-assign]
            for name in ("pick", "follow", "ahead"):
                setattr(kind, name, getattr(Bookkeeping, name))
            theirs, wanted = self.drafted()
        finally:
            for name, method in held.items():
                if method is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, method)
        assert ops is self.engine.ops
        pages = [torch.equal(a[:, 1:], b[:, 1:]) for a, b in zip(stored, wanted, strict=True)]
        return torch.equal(mine, theirs) and all(pages)


def clocked(ops: Ops, parts: tuple[Callable[[], Any], ...]) -> list[float]:
    """Microseconds of each, one after the other."""
    if not ops.asynchronous:
        marks = [time.perf_counter()]
        for part in parts:
            part()
            marks.append(time.perf_counter())
        return [1e6 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000)  # all is queued before it begins
    events[0].record()
    for part, event in zip(parts, events[1:], strict=True):
        part()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def copy_bandwidth(ops: Ops, size: int) -> float:
    """Bytes a second, read and written."""
    source = torch.ones(size // 4, device=ops.device)
    target = torch.empty_like(source)
    return 2 * size / (min(clocked(ops, (partial(target.copy_, source),))[0] for _ in range(8)) / 1e6)


def kernels(decoding: Decoding) -> dict[str, tuple[int, float]]:
    """Of the drafts behind a step: how often each kernel runs and its microseconds, as the profiler says."""
    from torch.profiler import ProfilerActivity, profile

    _, drafts = decoding.parts(decoding.k)
    decoding.put_back(decoding.k)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(4):
            drafts()
        torch.cuda.synchronize()
    found = sorted(seen.key_averages(), key=lambda one: -one.device_time_total)
    return {one.key[:60]: (one.count // 4, round(one.device_time_total / 4, 1)) for one in found if one.count}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--head")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    bandwidth = 0.0
    with tempfile.TemporaryDirectory() as folder:
        made = checkpoint(options)
        head = options.head or dummy_head(made, options.vocab, Path(folder))
        for batch in map(int, options.batches.split(",")):
            fresh = Checkpoint(made.config, dict(made.tensors), made.dtype, made.source, made.format)
            begin = time.monotonic()
            decoding = Decoding(options, batch, head, fresh)
            ops = decoding.engine.ops
            bandwidth = bandwidth or copy_bandwidth(ops, (2 << 30) if ops.asynchronous else (256 << 20))
            plain, keeping = decoding.times(0, options.repeat)
            step, drafts = decoding.times(options.k, options.repeat)
            floor = 1e6 * decoding.floor_bytes() / bandwidth
            line: dict[str, Any] = {"batch": batch, "plain": plain, "step": step, "drafts": drafts}
            line |= {"keeping": keeping, "floor": floor, "share": drafts / plain, "of floor": drafts / floor}
            line = {name: round(value, 3) for name, value in line.items()}
            if options.check:
                line["as op by op"] = decoding.check()
            if options.kernels and ops.asynchronous:
                line["kernels"] = kernels(decoding)
            lines.append(line | {"seconds to start and measure": round(time.monotonic() - begin, 1)})
            print(lines[-1], flush=True)
            del decoding
    shape = {"k": options.k, "context": options.context, "temperature": options.temperature}
    finish("rounds", {**shape, "copy GB/s": round(bandwidth / 1e9, 1), "microseconds": lines})


if __name__ == "__main__":
    main()
