"""Long run of one engine with a tiny random model; the last line of stdout is JSON.

    python bench/exactness/soak.py [--requests 2000] [--seed 0] [--pages 18] [--method ngram] [--no-overlap]
                         [--model llama] [--backend auto]

Requests of random lengths, options, priorities, salts and grammars share few pages. Some are aborted, some
have a logits processor or a grammar that raises or that makes their logits NaN, and some steps run out of
memory, before or after their work. Requests arrive in waves; after each wave every page, slot and index must
be free. Every output is compared bit for bit with a run alone (another engine, no drafts, no cache), finish
reason and error included; the output of an aborted request must be a prefix of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import gc
import logging
import random
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from common.measure import finish

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.errors import QueueFullError
from draftproof.models.config import LatentConfig, ModelConfig, MoeConfig
from draftproof.models.load import Checkpoint, load_checkpoint
from draftproof.ops.contract.types import Routing
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import Request

VOCAB, EOS, LONGEST = 97, 2, 120
PAGE = resource.getpagesize()
MODEL: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position": 256,
    "eos_token_ids": (EOS,),
}
MODELS: dict[str, dict[str, Any]] = {  # differences to MODEL
    "llama": {},
    "latent": {
        "architecture": "DeepseekV3ForCausalLM",
        "latent": LatentConfig(q_rank=24, kv_rank=32, nope_dim=12, value_dim=10, scale=0.2),
        "num_kv_heads": 4,
    },
    "experts": {
        "architecture": "Qwen3MoeForCausalLM",
        "qk_norm": True,
        "moe": MoeConfig(Routing(num_experts=8, top_k=2), intermediate_size=16),
    },
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 5},
    {"logprobs": 0, "prompt_logprobs": 3},
    {"frequency_penalty": 1.2, "logprobs": 2, "logprobs_mode": "processed"},
    {"top_k": 9, "top_p": 0.8},
    {"min_p": 0.05, "repetition_penalty": 1.3},
    {"logit_bias": {EOS: 4.0}},
    {"stop_token_ids": list(range(5, VOCAB, 9))},
    {"logprob_token_ids": [3, 50]},
    {"include_draft_logprobs": True, "logprobs": 1},
    {"speculative": False},
]


class Fault(Exception):
    """Injected error."""


@dataclass(frozen=True)
class FailingLogitsProcessor:
    """Logits processor that fails from a certain length on."""

    length: int
    kind: str

    def __call__(self, tokens: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        if len(tokens) >= self.length:
            if self.kind == "raises":
                raise Fault(f"at {self.length}")
            return row * torch.nan
        return row + 0.5 * (torch.arange(len(row), device=row.device) % 5 == len(tokens) % 5)


class ModuloGrammar:
    """Grammar in which tokens differ by multiples of three; it may raise after some tokens."""

    def __init__(self, breaks_at: int | None) -> None:
        self.breaks_at = breaks_at

    def start(self) -> ModuloGrammar:
        """Return the state before the first token."""
        made = ModuloGrammar(self.breaks_at)
        made.tokens = []
        return made

    tokens: list[int]

    def fill(self, row: torch.Tensor) -> None:
        """Set the bits of the tokens that may follow."""
        if self.breaks_at is not None and len(self.tokens) >= self.breaks_at:
            raise Fault(f"grammar at {self.breaks_at}")
        first = self.tokens[-1] % 3 if self.tokens else 0
        words = [0] * len(row)
        for token in range(first, VOCAB, 3):
            words[token // 32] |= 1 << token % 32
        row.copy_(torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32))

    def accept(self, token: int) -> bool:
        """Advance by a token."""
        self.tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        """Undo the last tokens."""
        del self.tokens[len(self.tokens) - count :]


@dataclass
class Received:
    """Results of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt: list[Any] = field(default_factory=list)
    end: tuple[Any, ...] = ()

    def take(self, out: Any) -> None:
        """Add the results of a step."""
        self.tokens += out.token_ids
        self.logprobs += out.logprobs or []
        self.prompt += out.prompt_logprobs or []
        if out.finish_reason:
            self.end = (out.finish_reason, out.stop_reason, out.error)

    def is_prefix_of(self, whole: Received) -> bool:
        """Return whether these are the first results of `whole`."""
        pairs = (self.tokens, whole.tokens), (self.logprobs, whole.logprobs), (self.prompt, whole.prompt)
        return all(repr(mine) == repr(theirs[: len(mine)]) for mine, theirs in pairs)


def weights(model: str) -> Checkpoint:
    """Return large random weights: with usual ones the logits hardly depend on the context."""
    made = load_checkpoint(
        ModelConfig(**{**MODEL, **MODELS[model]}), dtype="float32", load_format="dummy", seed=3
    )
    for name, tensor in made.tensors.items():
        if tensor.dim() == 2:
            tensor *= 16 if "embed" in name or "lm_head" in name else 8
    return made


def engine(model: str, **options: Any) -> Engine:
    """Build an engine of a tiny model."""
    sizes = {"max_model_len": 192, "max_num_batched_tokens": 48, "page_size": 8, "max_logprobs": -1}
    common = {"model": "tiny", "device": "cpu", "warm_up": False, **sizes}
    return Engine(EngineConfig(**{**common, **options}), weights(model))


class Soak:
    """One engine, its requests and what was wrong with them."""

    def __init__(
        self,
        seed: int = 0,
        pages: int = 18,
        method: str = "ngram",
        overlap: bool = True,
        model: str = "llama",
        backend: str = "auto",
    ) -> None:
        self.chance = random.Random(seed)
        speculative = SpeculativeConfig(method=method, num_speculative_tokens=4)
        self.target = engine(
            model,
            backend=backend,
            max_num_seqs=8,
            max_num_waiting=6,
            kv_cache_tokens=pages * 8,
            speculative=speculative,
            overlap=overlap,
            debug=True,
        )
        self.lost_steps = 0
        self.target.loop.device.run = self.with_injected_faults(self.target.loop.device.run)  # type: ignore[method-assign]
        self.alone = engine(
            model, backend=backend, max_num_seqs=1, enable_prefix_caching=False, overlap=False
        )
        self.systems = [[self.chance.randrange(3, VOCAB) for _ in range(40)] for _ in range(3)]
        self.count = 0
        self.refused = self.aborted = 0
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    def with_injected_faults(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run` with some calls that fail, before or after their work."""

        def call(*arguments: Any) -> Any:
            luck = self.chance.random()
            ran = run(*arguments) if luck > 0.005 else None
            if luck < 0.01:
                self.lost_steps += 1
                raise torch.OutOfMemoryError("injected")
            return ran

        return call

    def request(self) -> Request:
        """Return a random request."""
        chance, name = self.chance, str(self.count)
        self.count += 1
        prompt = chance.choice(self.systems)[: chance.randint(0, 40)]
        prompt = prompt + [chance.randrange(3, VOCAB) for _ in range(chance.randint(1, 8))] * chance.randint(
            1, 4
        )
        options = dict(chance.choice(OPTIONS))
        most = chance.choice([1, 3, 10, 25, 25, LONGEST - len(prompt)])
        trouble, grammar = chance.random(), None
        if trouble < 0.08:
            at = len(prompt) + chance.randint(0, 12)
            options["logits_processors"] = [FailingLogitsProcessor(at, chance.choice(["raises", "nan"]))]
        elif trouble < 0.2:
            grammar = ModuloGrammar(chance.choice([None, None, chance.randint(0, 12)]))
        params = SamplingParams(
            temperature=chance.choice([0.0, 0.7, 1.3]),
            max_tokens=most,
            priority=chance.choice([0, 0, 0, 1, -1]),
            cache_salt=chance.choice([None, None, "a"]),
            **options,
        )
        seed = chance.randrange(2**40)
        return Request(
            id=name, prompt_token_ids=prompt, params=params, seed=seed, eos_token_ids=(EOS,), grammar=grammar
        )

    def serve_batch(self, size: int) -> None:
        """Serve a wave of requests; check that no page or slot is in use and that the results are equal."""
        todo = [self.request() for _ in range(size)]
        requests = {r.id: r for r in todo}
        received = {name: Received() for name in requests}
        gone: set[str] = set()
        todo.reverse()
        while todo or self.target.has_work:
            for _ in range(self.chance.choice([0, 1, 3])):
                if not todo:
                    break
                try:
                    self.target.add(todo[-1])
                    todo.pop()
                except QueueFullError:
                    self.refused += 1
                    break
            for out in self.target.step():
                if out.request_id in gone:
                    self.wrong.append(f"{out.request_id}: results after its abort")
                received[out.request_id].take(out)
            if self.chance.random() < 0.04:
                here = [name for name, r in received.items() if not r.end and name not in gone]
                name = self.chance.choice(here) if here else ""
                if name and self.target.abort(name):
                    gone.add(name)
        while self.target.loop.pending:  # steps in flight when the last request finished
            self.target.step()
        self.check_empty()
        for name, request in requests.items():
            self.compare(request, received[name], name in gone)

    def compare(self, request: Request, received: Received, gone: bool) -> None:
        """Compare the results of a request with a run alone; `gone`: it was aborted."""
        whole = Received()
        self.alone.add(request)
        while self.alone.has_work:
            for out in self.alone.step():
                whole.take(out)
        if not received.is_prefix_of(whole):
            self.wrong.append(f"{request.id}: {received} is not {whole}")
        if gone:
            self.aborted += 1
            return
        if received.end != whole.end or len(received.tokens) != len(whole.tokens):
            self.wrong.append(f"{request.id}: ended {received.end}, alone {whole.end}")
        if received.end[0] == "error" and not received.end[2]:
            self.wrong.append(f"{request.id}: failed without a reason")
        self.ends[received.end[0]] += 1

    def check_empty(self) -> None:
        """Check that no page, slot or index is in use."""
        loop = self.target.loop
        stats, slots = self.target.stats(), loop.slots
        if (
            stats.num_used_pages
            or stats.num_running
            or stats.num_waiting
            or loop.pending
            or loop.release.unread
        ):
            self.wrong.append(f"still in use: {stats}")
        if slots.num_free != len(slots.requests) or loop.scheduler.num_needing_sync or self.target._sequences:
            self.wrong.append("a slot or an index is not free")
        loop.scheduler.pages.check()


def soak(requests: int, wave: int = 50, **options: Any) -> dict[str, Any]:
    """Run waves of requests; return counts, failures and memory."""
    torch.set_num_threads(1)  # more do not help a tiny model
    soaked = Soak(**options)
    objects: list[int] = []
    resident: list[float] = []
    while soaked.count < requests:
        soaked.serve_batch(min(wave, requests - soaked.count))
        gc.collect()
        objects.append(len(gc.get_objects()))
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20)
    stats = soaked.target.stats()
    half = max(1, len(objects) // 2)
    return {
        "requests": soaked.count,
        "wrong": soaked.wrong[:5],
        "num_wrong": len(soaked.wrong),
        "ends": dict(soaked.ends),
        "aborted": soaked.aborted,
        "refused_for_now": soaked.refused,
        "lost_steps": soaked.lost_steps,
        "preemptions": stats.num_preemptions,
        "cached_tokens": stats.num_cached_tokens,
        "queried_tokens": stats.num_queried_tokens,
        "objects_first_half": max(objects[:half]),
        "objects_end": objects[-1],
        "rss_mib_first_half": round(max(resident[:half]), 1),
        "rss_mib_end": round(resident[-1], 1),
    }


def main() -> None:
    """Run the soak test; exit status 1 if a result was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pages", type=int, default=18)
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    logging.getLogger("draftproof").setLevel(logging.CRITICAL)  # every lost step is logged
    figures = soak(
        args.requests,
        seed=args.seed,
        pages=args.pages,
        method=args.method,
        overlap=not args.no_overlap,
        model=args.model,
        backend=args.backend,
    )
    finish("soak", figures)
    if figures["num_wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
