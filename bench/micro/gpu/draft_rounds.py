"""Cost of a head's drafts: K rounds behind a step against the step itself, and the floor from bytes moved.

    python bench/micro/gpu/draft_rounds.py [--model FOLDER --load-format dummy] [--head FOLDER]
        [--batches 1,8,64,256] [--k 4]

Without --model the target has the shape of SmolLM2-135M, without --head there is a one-layer EAGLE-3 head
for it with `--vocab` draft ids (`--method hybrid`: beside a suffix search); both have random weights, which
cost as much as trained ones. One engine has as many slots as the largest batch; every request has `--context`
tokens. Times are medians of replays of the engine's own captured steps, from the same state each:

    plain     a step of one row a request         step      the step that verifies K drafts of each
    drafts    the K rounds behind that step       keeping   the head behind a plain step, without drafts
    idle      these rounds without any budget

`share` is drafts / plain. The floor of the drafts: the head's weights and its LM head once a round, the layer
that joins features once, K and V of all tokens before, at the bandwidth of a large copy measured here. Data
that stay in the second-level cache between rounds can be faster. `--check` compares drafts, K and V bit by
bit with those of separate ops. The last line of stdout is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench/

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from common.dummy_head import write_dummy_head
from common.measure import finish
from torch import Tensor

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.engine.sequence import Sequence as EngineRequest
from draftproof.engine.step.graph_cache import GraphTask
from draftproof.engine.step.warmup import WarmUp
from draftproof.models.config import ModelConfig
from draftproof.models.draft_head.config import TargetIdentity
from draftproof.models.load import Checkpoint, load_checkpoint
from draftproof.ops import Ops
from draftproof.ops.contract.forward import ForwardOps
from draftproof.ops.torch.draft_rounds import TorchRounds
from draftproof.propose.head import HeadProposer
from draftproof.propose.hybrid import HybridProposer
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import DraftSpec, Request, StepFeatures

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, intermediate_size=1536, norm_eps=1e-5, rope_theta=100000.0,
    max_position=8192, tie_embeddings=True, eos_token_ids=(2,),
)  # fmt: skip

T = TypeVar("T")
TRAITS = StepFeatures((0,))
# fused ops, and the classes that define them op by op
SEPARATE_OPS: list[tuple[str, str, type]] = [
    *(("forward", name, ForwardOps) for name in ("fused_layers", "embed_norm_concat")),
    *(("rounds", name, TorchRounds) for name in ("lm_head_sample", "shift_rows", "plan_draft_rows")),
]
BEGUN = _last_report = time.monotonic()


def checkpoint(options: argparse.Namespace) -> Checkpoint:
    """Load the target."""
    source = options.model or SMOLLM2
    how = {} if options.model and options.load_format == "auto" else {"load_format": options.load_format}
    if not options.model:
        how = {"load_format": "dummy"}
    return load_checkpoint(source, dtype="bfloat16", progress=False, **how)


def dummy_head(made: Checkpoint, vocab: int, folder: Path) -> str:
    """Write a head for the target with `vocab` ids; return its folder."""
    target = TargetIdentity.from_weights(made.config, made.tensors)
    return write_dummy_head(made.config, target, vocab, folder)


class Decoding:
    """Engine whose slots all have a request in the middle of its output.

    Tokens, K and V are random, which costs as much as real ones.
    """

    def __init__(self, options: argparse.Namespace, head: str, made: Checkpoint) -> None:
        k, most, length = options.k, max(options.batches), options.context + 1
        spec: dict[str, Any] = {"method": options.method, "model": head}
        if options.method == "hybrid":
            spec = {
                "method": "hybrid",
                "proposers": [{"method": "eagle3", "model": head}, {"method": "suffix"}],
            }
        spec |= {"num_speculative_tokens": k, "adaptive": False}
        room = length + 2 * (k + 1)
        config = EngineConfig(
            model="bench", device=options.device, backend=options.backend, max_model_len=room,
            max_num_seqs=most, kv_cache_tokens=most * (room + 16), enable_prefix_caching=False, warm_up=False,
            max_num_batched_tokens=max(512, most * (k + 1)), speculative=SpeculativeConfig.parse(spec),
        )  # fmt: skip
        self.engine, self.k = Engine(config, made), k
        self.device = self.engine.loop.device
        drafter = self.device.drafting.proposer
        assert drafter is not None
        self._known = [(line, line.clone()) for line in drafter.state_tensors]
        if isinstance(drafter, HybridProposer):
            drafter = drafter.members[drafter.model_source]
        assert isinstance(drafter, HeadProposer)
        self.drafter = drafter
        params = SamplingParams(temperature=options.temperature, max_tokens=room, ignore_eos=True)
        random, slots = torch.Generator().manual_seed(2), self.device.slots
        pages = -(-room // config.page_size)
        inits = []
        for i in range(most):
            ids = torch.randint(made.config.vocab_size, (length,), generator=random).tolist()
            request = Request(id=str(i), prompt_token_ids=ids, params=params, seed=i)
            mine = range(1 + i * pages, 1 + (i + 1) * pages)  # page 0 is the scrap page
            sizes = {"pages": list(mine), "num_cached": options.context}
            inits.append(EngineRequest(request, room, slot=slots.take(request), **sizes))
        assert pages * most < drafter.env.num_pages
        slots.fill(inits)
        self.slots = torch.tensor([init.slot for init in inits], device=slots.device)
        torch.manual_seed(3)
        for cache in (*self.engine.runner.caches, *drafter.caches):
            cache.normal_()
        slots.columns.draft.random_(made.config.vocab_size)
        names = ("length", "computed", "num_draft", "finish_status", "draft", "tokens")
        self._state = {name: getattr(slots.columns, name).clone() for name in names}
        self._stored = [cache.clone() for cache in drafter.caches]

    def capture_all(self, batches: Sequence[int], check: bool) -> None:
        """Capture all steps and drafts that will be timed."""
        counts = (0, self.k)
        work: list[GraphTask] = [
            part for batch in batches for count in counts for part in self._work(batch, count)
        ]
        compile_only = [
            partial(self.with_separate_ops, partial(self.drafted, batch)) for batch in batches if check
        ]
        WarmUp(self.device).capture(work, report, compile_only)

    def restore_state(self, batch: int, drafts: int, has_budget: bool = True) -> None:
        """Restore the state before the step; `has_budget`: drafts may be made."""
        columns, plan = self.device.slots.columns, self.device.plan
        for name, held in self._state.items():
            getattr(columns, name).copy_(held)
        columns.num_draft.fill_(drafts)
        for line, held in self._known:
            line.copy_(held)
        for line, value in ((plan.slots, -1), (plan.chunk, 0), (plan.drafts, 0), (plan.budget, 0)):
            line.fill_(value)
        plan.slots[:batch] = self.slots[:batch]
        plan.drafts[:batch], plan.budget[:batch] = drafts, drafts if has_budget else 0
        self.device.plan_buffer.invalidate()

    def _sizes(self, batch: int, drafts: int) -> tuple[int, int]:
        """Return the rows of a step that verifies so many drafts of each, and entries."""
        ops = self.engine.ops
        return ops.runtime.bucket(batch * (1 + drafts)), min(ops.runtime.bucket(batch), len(self.slots))

    def _work(self, batch: int, drafts: int) -> list[GraphTask]:
        """Return the step that verifies so many drafts of each, and the drafts behind it."""
        rows, entries = self._sizes(batch, drafts)
        step = self.device.decode_task(rows, TRAITS)
        return [step, self.device.draft_task(rows, entries, DraftSpec(drafts))]

    def parts(self, batch: int, drafts: int) -> tuple[Callable[[], Any], ...]:
        """Return the captured step and the captured drafts behind it."""
        return tuple(self.device.graphs.get(task) for task in self._work(batch, drafts))

    def times(self, batch: int, drafts: int, repeat: int, has_budget: bool = True) -> tuple[float, float]:
        """Return the microseconds of a step and of the drafts behind it."""
        parts, found = self.parts(batch, drafts), []
        for _ in range(repeat + 3):
            with self.engine.ops.runtime.step_context():
                self.restore_state(batch, drafts, has_budget)
                found.append(clocked(self.engine.ops, parts))
        self._check_drafter()
        step, behind = zip(*found[3:], strict=True)
        return statistics.median(step), statistics.median(behind)

    def floor_bytes(self, batch: int) -> int:
        """Return the bytes that the drafts behind a step of full windows must move."""
        model, config = self.drafter.model, self.drafter.model.config
        layer = [
            (p.weight, p.bias)
            for one in model.layers
            for p in (one.attention.qkv, one.attention.out, one.mlp.gate_up, one.mlp.down)
        ]
        sizes = sum(t.nbytes for pair in layer for t in pair if t is not None)
        once = model.fc.weight.nbytes + batch * (1 + self.k) * model.fc.weight.shape[1] * 2
        context = int(self._state["length"][:batch].sum())
        stored = sum(cache[:, 0, 0].nbytes for cache in self.drafter.caches) * context
        rows = 4 * batch * config.hidden_size * 2
        return once + self.k * (sizes + model.lm_head.weight.nbytes + stored + rows)

    def drafted(self, batch: int) -> tuple[Tensor, list[Tensor]]:
        """Return drafts and the head's KV after a step without graphs."""
        self.restore_state(batch, self.k)
        for cache, held in zip(self.drafter.caches, self._stored, strict=True):
            cache.copy_(held)
        for task in self._work(batch, self.k):
            task.function()
        columns = self.device.slots.columns
        return columns.draft[self.slots[:batch]], [cache.clone() for cache in self.drafter.caches]

    def with_separate_ops(self, function: Callable[[], T]) -> T:
        """Call `function` with separate ops in place of the fused ones."""
        ops = self.engine.ops
        kinds = [(type(getattr(ops, family)), name, owner) for family, name, owner in SEPARATE_OPS]
        own = [(kind, name, kind.__dict__.get(name)) for kind, name, _ in kinds]
        try:
            for kind, name, owner in kinds:
                setattr(kind, name, getattr(owner, name))
            return function()
        finally:
            for kind, name, method in own:
                if method is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, method)

    def check(self, batch: int) -> bool:
        """Return whether drafts and KV equal those of separate ops."""
        mine, stored = self.drafted(batch)
        theirs, wanted = self.with_separate_ops(partial(self.drafted, batch))
        self._check_drafter()
        pages = [torch.equal(a[:, 1:], b[:, 1:]) for a, b in zip(stored, wanted, strict=True)]
        news = [bool((a != b).any()) for a, b in zip(stored, self._stored, strict=True)]
        return torch.equal(mine, theirs) and all(pages) and all(news)

    def _check_drafter(self) -> None:
        if self.device.drafting.failure is not None:
            raise self.device.drafting.failure


def clocked(ops: Ops, parts: tuple[Callable[[], Any], ...]) -> list[float]:
    """Return the microseconds of each part, run in order."""
    if not ops.runtime.asynchronous:
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
    """Return bytes a second, read and written."""
    source = torch.ones(size // 4, device=ops.device)
    target = torch.empty_like(source)
    return 2 * size / (min(clocked(ops, (partial(target.copy_, source),))[0] for _ in range(8)) / 1e6)


def kernels(
    decoding: Decoding, batch: int, drafts: int, has_budget: bool = True
) -> list[tuple[str, float, float]]:
    """Return name, begin and length in microseconds of each kernel of the drafts behind a step."""
    from torch.profiler import ProfilerActivity, profile

    step, behind = decoding.parts(batch, drafts)
    decoding.restore_state(batch, drafts, has_budget)
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        behind()
        torch.cuda.synchronize()
    ran = sorted((one.time_range.start, one.time_range.end, one.name) for one in seen.events() or ())
    first = ran[0][0] if ran else 0
    return [(name[:40], round(begin - first, 1), round(end - begin, 1)) for begin, end, name in ran]


def report(what: str, done: int, of: int) -> None:
    """Print the progress every five seconds."""
    global _last_report
    now = time.monotonic()
    if now - _last_report >= 5 or done == of:
        _last_report = now
        print(f"{now - BEGUN:.0f} s: {what}, {done} of {of}", flush=True)


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all batch sizes."""
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        made = checkpoint(options)
        head = options.head or dummy_head(made, options.vocab, Path(folder))
        decoding = Decoding(options, head, made)
    ops = decoding.engine.ops
    with ops.runtime.step_context():
        decoding.capture_all(options.batches, options.check)
    bandwidth = copy_bandwidth(ops, (2 << 30) if ops.runtime.asynchronous else options.copy << 20)
    for batch in options.batches:
        repeat = options.repeat
        plain, keeping = decoding.times(batch, 0, repeat)
        step, drafts = decoding.times(batch, options.k, repeat)
        _, idle = decoding.times(batch, options.k, repeat, has_budget=False)
        floor = 1e6 * decoding.floor_bytes(batch) / bandwidth
        line: dict[str, Any] = {"batch": batch, "plain": plain, "step": step, "drafts": drafts}
        line |= {"idle": idle, "keeping": keeping}
        line |= {"floor": floor, "share": drafts / plain, "of floor": drafts / floor}
        line = {name: round(value, 3) for name, value in line.items()}
        print(f"{time.monotonic() - BEGUN:.0f} s: {line}", flush=True)
        if options.check:
            line["as op by op"] = decoding.check(batch)
        if options.kernels and ops.runtime.asynchronous:
            line["kernels"] = {
                "drafts": kernels(decoding, batch, options.k),
                "idle": kernels(decoding, batch, options.k, has_budget=False),
                "keeping": kernels(decoding, batch, 0),
            }
        lines.append(line)
        report("batches", len(lines), len(options.batches))
    shape = {"k": options.k, "context": options.context, "temperature": options.temperature}
    took = round(time.monotonic() - BEGUN, 1)
    return {**shape, "copy GB/s": round(bandwidth / 1e9, 1), "seconds in all": took, "microseconds": lines}


def numbers(text: str) -> list[int]:
    """Return the numbers of a comma-separated list."""
    return [int(number) for number in text.split(",")]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--head")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--batches", type=numbers, default="1,8,64,256")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--copy", type=int, default=256, help="MiB that are copied, where there is no GPU")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    finish("draft_rounds", measure(parsed()))
