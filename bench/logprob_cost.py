"""Cost of logprobs beside each proposer, of one checkout or two in turn; the last line of stdout is JSON.

    python bench/logprob_cost.py [--old ../draftproof-before] [--batches 1,8,64,256] [--rounds 4]
                                 [--new-engines head,ngram,hybrid,draft_model] [--old-engines head]
                                 [--sides 0,5,20,drafts,named,"one request"] [--out FILE]

Sides and bars: see `common/gpu_logprob_cost.py`. Each engine has a process of its own, and all start at
once. In a round the engines of both checkouts have their turn, and in it every side, so that a slow phase of
the machine affects all. A side is divided by that without logprobs of the same turn (median, least, most).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from common.checkouts.checkout_process import CheckoutProcess
from common.gpu_logprob_cost import DRAFTER_BARS, proposers_of
from common.measure import finish

WORKER = Path(__file__).parent / "common" / "checkouts" / "logprob_cost_worker.py"
PROPOSERS = ("head", "ngram", "hybrid", "draft_model")
MIN_ROUNDS = 2


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the speeds of all sides over that of "none", and how many steps were captured meanwhile."""
    captures = sum(one.pop("captures") for one in turns)
    found: dict[str, Any] = {
        "rounds": len(turns),
        "captures": captures,
        "none": round(statistics.median(one["none"]["tok/s"] for one in turns), 1),
        "alike": len({one[name]["acceptance length"] for one in turns for name in one}) == 1,
        "acceptance length": round(turns[0]["none"]["acceptance length"], 3),
    }
    sides = [name for name in turns[0] if name != "none"]
    for name in sides:
        ratios = sorted(one[name]["tok/s"] / one["none"]["tok/s"] for one in turns)
        found[name] = [round(x, 4) for x in (statistics.median(ratios), ratios[0], ratios[-1])]
    found["within bars"] = all(found[name][0] >= DRAFTER_BARS[name] for name in sides)
    return found


def main() -> None:
    """Measure all cells and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = {"type": lambda text: [part for part in text.split(",") if part]}
    parser.add_argument("--old", type=Path, help="another checkout")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head", help="a head's folder; default: the one shipped for the model")
    parser.add_argument("--draft-model", help="default: the model itself")
    parser.add_argument("--new-engines", default=PROPOSERS, **several)
    parser.add_argument("--old-engines", default=PROPOSERS, **several)
    parser.add_argument("--batches", default=["1", "8", "64", "256"], **several)
    parser.add_argument("--sides", default=list(DRAFTER_BARS), **several)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cell-seconds", type=float, default=60, help="no new round of a cell after this")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new cell after this")
    parser.add_argument("--out", type=Path, help="JSON after every cell")
    options = parser.parse_args()
    deadline, batches = time.monotonic() + options.seconds, [int(n) for n in options.batches]
    workers: dict[str, dict[str, CheckoutProcess]] = defaultdict(dict)
    for name, proposer in proposers_of(options).items():
        engine = dict(
            model=options.model, dtype="bfloat16", device=options.device, enable_prefix_caching=False
        )
        engine |= dict(max_model_len=1024, max_num_seqs=max(batches), kv_cache_tokens=512 * max(batches))
        engine["speculative_config"] = {"num_speculative_tokens": 4, **proposer}
        for version, names in (("old", options.old_engines), ("new", options.new_engines)):
            folder = getattr(options, version)
            if folder is not None and name in names:
                workers[name][version] = CheckoutProcess(folder, WORKER)
                workers[name][version].send(engine=engine)
    found: dict[str, Any] = {"start seconds": {}}
    for name, versions in workers.items():
        seconds = {version: round(worker.receive()["seconds"], 1) for version, worker in versions.items()}
        found["start seconds"][name] = seconds
    print(found, file=sys.stderr, flush=True)
    sides, cells = ["none", *options.sides], found.setdefault("cells", {})
    order = [name for name in PROPOSERS if name in workers]
    for name, batch in ((name, batch) for name in order for batch in batches):
        if time.monotonic() > deadline:
            continue
        until = time.monotonic() + options.cell_seconds
        turns: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for worker in workers[name].values():
            worker.call(batch=batch, sides=sides)
        for number in range(options.rounds):
            if number >= MIN_ROUNDS and time.monotonic() > until:
                break
            first = number % len(sides)
            for version in sorted(workers[name], reverse=bool(number % 2)):
                turns[version].append(workers[name][version].call(turn=sides[first:] + sides[:first]))
        cells[f"{name} {batch}"] = {version: summary(some) for version, some in turns.items()}
        print(name, batch, cells[f"{name} {batch}"], file=sys.stderr, flush=True)
        if options.out:
            options.out.write_text(json.dumps(found))
    for versions in workers.values():
        for worker in versions.values():
            worker.close()
    finish("logprob_cost", found)


if __name__ == "__main__":
    main()
