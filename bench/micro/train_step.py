"""Time of a training update, and its share by op; the last line of stdout is JSON.

    python bench/micro/train_step.py [--model smollm2-135m] [--device cuda] [--keep 0,1]

Texts of random ids, of 64 to 1,024 tokens. The time does not depend on the token values. Seconds per update
are measured without the profiler. Shares of ops and their sum are measured with it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
from itertools import islice
from typing import Any

import numpy as np
import torch
from common.measure import finish
from torch.profiler import ProfilerActivity, profile

from draftproof.models.load import Checkpoint, load_checkpoint
from draftproof.train.config import TrainPlan
from draftproof.train.data.dataset import Text
from draftproof.train.pipeline import repeatable
from draftproof.train.progress import ProgressReporter
from draftproof.train.time_budget import time_updates
from draftproof.train.trainer import Trainer


def texts(count: int, longest: int, vocab: int) -> list[Text]:
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(64), np.log(longest), count)).astype(int).tolist()
    return [Text(rng.integers(0, vocab, n), n // 3, float(i % 2), i) for i, n in enumerate(lengths)]


def measure(options: argparse.Namespace, checkpoint: Checkpoint, keep: int) -> dict[str, Any]:
    device = torch.device(options.device)
    plan = TrainPlan(
        model=options.model,
        keep=keep,
        batch_tokens=options.batch_tokens,
        draft_vocab=options.draft_vocab,
        intermediate_size=options.intermediate_size,
        dtype=options.dtype,
        steps=1000,
    )
    some = texts(options.texts, 1024, checkpoint.config.vocab_size)
    with repeatable():
        trainer = Trainer(plan, checkpoint, some, some[:2], device, ProgressReporter())
        pace, first = time_updates(trainer, options.updates)
        batches = list(islice(trainer.batches.from_step(0), options.updates))
        tokens = sum(int(batch.lengths.sum()) for batch in batches) / len(batches)
        gpu = device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as seen:
            for batch in batches[:4]:
                trainer.learn(batch, False)
            next(iter(trainer.weights.values())).detach().cpu()
    cost = "self_device_time_total" if gpu else "self_cpu_time_total"
    ops = sorted(seen.key_averages(), key=lambda op: -float(getattr(op, cost)))
    total = sum(float(getattr(op, cost)) for op in ops)
    table = {op.key[:80]: round(float(getattr(op, cost)) / total, 4) for op in ops[: options.top]}
    for name, share in table.items():
        print(f"{100 * share:6.2f} %  {name}")
    return {
        "ms an update": round(1000 * pace, 2),
        "seconds of the first time": round(first, 1),  # compiling, capturing
        "ms of its ops": round(total / 4000, 2),  # far less: the host is what takes the time
        "tokens/s": round(tokens / pace),
        "shares": table,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument("--intermediate-size", type=int, default=1920)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--keep", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1])
    parser.add_argument("--top", type=int, default=25, help="ops to be named")
    options = parser.parse_args()
    checkpoint = load_checkpoint(options.model)
    finish("train_step", {f"keep {keep}": measure(options, checkpoint, keep) for keep in options.keep})


if __name__ == "__main__":
    main()
