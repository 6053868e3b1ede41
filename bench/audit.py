"""Power, false alarms and cost of `draftproof audit`; the last line of stdout is JSON.

    python bench/audit.py simulate [--audits 1000] [--figures honest]
    python bench/audit.py stack [--repetitions 100]
    python bench/audit.py ours [--budget 14000]

`simulate`: all statistical tests over tokens drawn from stub models, honest and biased. The check of the
smallest reported bias draws tokens with exactly that bias. `stack`: whole audits of stub servers, planted
faults and honest variations. `ours`: this server with a tiny model, every proposer and strategy.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common.audit_rows import TOP_COUNT, RowTable
from common.measure import finish

from draftproof.audit.probes.token_tests import TokenTests
from draftproof.audit.runner import audit
from draftproof.audit.self_test import FAULTS, VARIATIONS, Tally, audit_fault, audit_honest
from draftproof.audit.stub.model import StubModel

ANSWER_TOKENS = 256
QUICK_TOKENS = 10_000
MODELS = [
    (seed, vocab, sharpness) for seed in range(4) for vocab, sharpness in ((60, 1), (24, 2), (150, 0.5))
]
PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
    "hybrid": {
        "method": "hybrid",
        "num_speculative_tokens": 4,
        "proposers": [{"method": "suffix"}, {"method": "ngram", "prompt_lookup_min": 1}],
    },
}


def simulate(tables: list[RowTable], audits: int, tokens: int, bias: float, seed: int) -> dict[str, Any]:
    """Run the statistical tests over drawn tokens; count audits with a rejection."""
    found, used = [], []
    for number in range(audits):
        rng = np.random.default_rng([seed, number])
        table = tables[number % len(tables)]
        tests = TokenTests(TOP_COUNT)
        while tests.tokens < tokens and not tests.rejected():
            tests.add_rows(table.answer(rng, ANSWER_TOKENS, bias))
        found.append(bool(tests.rejected()))
        used.append(tests.tokens)
    return {
        "bias": bias,
        "budget_tokens": tokens,
        "audits": audits,
        "flagged": sum(found),
        "median_tokens": int(np.median(used)),
    }


def check_smallest_bias(tables: list[RowTable], audits: int) -> dict[str, Any]:
    """Draw tokens with the smallest bias that honest runs report, and return the share that is found."""
    reported = []
    for number, table in enumerate(tables):
        tests, rng = TokenTests(TOP_COUNT), np.random.default_rng([5, number])
        while tests.tokens < QUICK_TOKENS:
            tests.add_rows(table.answer(rng, ANSWER_TOKENS, 0.0))
        (top1,) = (s for s in tests.statistics() if s.test == "top1")
        reported.append(top1.smallest_bias or 1.0)
    results = [
        simulate([table], audits, QUICK_TOKENS, bias, 6)["flagged"] / audits
        for table, bias in zip(tables, reported, strict=True)
    ]
    return {"reported_points": [round(100 * b, 2) for b in reported], "found_share": results}


def stacks(repetitions: int) -> list[dict[str, Any]]:
    """Audit stub servers over HTTP."""
    tallies = [Tally(name, case.title, False, case.sampling_tokens) for name, case in FAULTS.items()]
    tallies += [Tally(name, "honest", True, 0) for name in VARIATIONS]
    for tally in tallies:
        run = audit_honest if tally.is_honest else audit_fault
        for number in range(repetitions):
            tally.add(run(tally.name, number))
        show(f"{tally.name}: {tally.flagged} of {tally.audits}")
    return [
        {
            "stub": tally.name,
            "is_honest": tally.is_honest,
            "title": tally.title,
            "flagged": tally.flagged,
            "audits": tally.audits,
            "median_tokens": sorted(tally.tokens)[len(tally.tokens) // 2],
            "max_tokens": max(tally.tokens),
        }
        for tally in tallies
    ]


def ours(budget: int) -> list[dict[str, Any]]:
    """Audit this server with a tiny model."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
    from serving import make_folder, serving, tiny

    cases = {f"{p} target_match": {**spec} for p, spec in PROPOSERS.items()}
    ngram = {**PROPOSERS["ngram"], "adaptive": False}
    cases["none"] = {}
    cases["ngram rejection"] = {**ngram, "verify_strategy": "rejection"}
    cases["ngram topp"] = {**ngram, "verify_strategy": "topp"}
    cases["ngram accept_all"] = {**ngram, "accept_policy": "accept_all"}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(Path(name))
        for case, speculation in cases.items():
            start = time.monotonic()
            with serving(tiny(folder, speculation or None, debug=False)) as served:
                report = audit(served.url, budget_tokens=budget, timeout_seconds=600)
            row = {
                "case": case,
                "verdict": str(report.verdict),
                "statement": report.statement(),
                "epsilon": report.epsilon,
                "drafts": [report.accepted_tokens, report.draft_tokens],
                "tokens": report.generated_tokens + report.prompt_tokens,
                "seconds": round(time.monotonic() - start, 1),
                "tests": {r.test: str(r.status) for r in report.results},
            }
            rows.append(row)
            show(f"{case}: {report.statement()} {row['drafts']} {row['seconds']} s")
    return rows


def show(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Run one part."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("simulate", "stack", "ours"))
    parser.add_argument("--audits", type=int, default=1000)
    parser.add_argument(
        "--figures", help="names separated by commas: bias_3_points, bias_1_point, honest ..."
    )
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--budget", type=int, default=14_000)
    options = parser.parse_args()
    if options.part == "ours":
        finish("audit", {"ours": ours(options.budget)})
        return
    if options.part == "stack":
        finish("audit", {"stack": stacks(options.repetitions)})
        return
    tables = [RowTable(StubModel(*model)) for model in MODELS]
    usual = tables[::3]  # the models of the self-test
    figures: dict[str, Any] = {}
    for name, run in {
        "bias_3_points": lambda: simulate(usual, options.audits, 5_000, 0.03, 2),
        "bias_1_point": lambda: simulate(usual, options.audits // 5, 40_000, 0.01, 3),
        "honest": lambda: simulate(tables, options.audits, QUICK_TOKENS, 0.0, 1),
        "smallest_bias": lambda: check_smallest_bias(tables[:3], max(20, options.audits // 20)),
    }.items():
        if options.figures is None or name in options.figures.split(","):
            figures[name] = run()
            show(f"{name}: {figures[name]}")
    finish("audit", {"simulated": figures})


if __name__ == "__main__":
    main()
