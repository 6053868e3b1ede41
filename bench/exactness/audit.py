"""Power, false alarms and cost of `draftproof audit`; the last line of stdout is JSON.

    python bench/exactness/audit.py stubs [--repetitions 100] [--honest 1000] [--first 0] [--stubs NAMES]
    python bench/exactness/audit.py paced [--speed 50]
    python bench/exactness/audit.py ours [--budget 12000] [--cases NAMES]

`stubs`: whole audits of stub servers, planted faults and honest variations, as `audit --self-test` runs them.
`paced`: one quick audit of a stub server that generates `--speed` tokens a second, over all its requests.
`ours`: this server with every proposer and strategy.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import logging
import math
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
from common.measure import finish

from draftproof.audit.report.verdict import Report
from draftproof.audit.runner import audit
from draftproof.audit.self_test import FAULTS, STUB_URL, VARIATIONS, Tally, audit_stub, tally_of
from draftproof.audit.stub.model import StubModel
from draftproof.audit.stub.server import StubServer


@dataclass
class StubRow:
    """Audits of one stub."""

    tally: Tally
    verdicts: Counter[str] = field(default_factory=Counter)
    violated: Counter[str] = field(default_factory=Counter)

    def add(self, report: Report) -> None:
        """Count one audit."""
        self.tally.add(report)
        self.verdicts[str(report.verdict)] += 1
        self.violated.update(result.test for result in report.violations)

    def figures(self) -> dict[str, Any]:
        """Return what is kept."""
        tally = self.tally
        return {
            "stub": tally.name,
            "is_honest": tally.is_honest,
            "title": tally.title,
            "audits": tally.audits,
            "flagged": tally.flagged,
            "sampling_tokens": tally.budget_tokens,
            "median_tokens": sorted(tally.tokens)[len(tally.tokens) // 2],
            "max_tokens": max(tally.tokens),
            "verdicts": dict(self.verdicts),
            "violated": dict(self.violated),
        }


def stubs(
    names: list[str], repetitions: int, honest: int, first: int, workers: int, minutes: float
) -> list[dict[str, Any]]:
    """Audit stub servers in turn until all are done or the time is over.

    first: number of the first audit; the number selects model and noise. Each fault begins with it. The
    numbers of honest variations follow each other, so that no two audits have the same noise.
    """
    rows = {name: StubRow(tally_of(name)) for name in names}
    variations = [name for name in names if name in VARIATIONS]
    share = -(-honest // max(1, len(variations)))
    ranges = {name: range(first, first + repetitions) for name in names}
    for place, name in enumerate(variations):
        ranges[name] = range(first + place * share, first + (place + 1) * share)
    tasks = [(number, name) for name in names for number in ranges[name]]
    tasks.sort(key=lambda task: task[0] - ranges[task[1]].start)
    end = time.monotonic() + 60 * minutes
    with ProcessPoolExecutor(workers) as pool:
        reports = pool.map(audit_stub, [name for _, name in tasks], [number for number, _ in tasks])
        for (_, name), report in zip(tasks, reports, strict=True):
            rows[name].add(report)
            if name == names[-1] and rows[name].tally.audits % 10 == 0:
                found = ", ".join(f"{n} {row.tally.flagged}/{row.tally.audits}" for n, row in rows.items())
                show(found)
            if time.monotonic() > end:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return [row.figures() for row in rows.values() if row.tally.audits]


class PacedServer(StubServer):
    """Stub whose requests share a number of generated tokens a second."""

    def __init__(self, model: StubModel, tokens_per_second: float) -> None:
        super().__init__(model, entropy=1)
        self._seconds_per_token = 1 / tokens_per_second
        self._free_at = 0.0
        self._clock_lock = threading.Lock()

    def handle(self, request: httpx.Request) -> httpx.Response:
        """Answer a request when its tokens are due."""
        response = super().handle(request)
        body = response.text
        usage = body.rpartition('"completion_tokens":')[2].strip()
        tokens = int(usage[: len(usage) - len(usage.lstrip("0123456789"))] or 0) if usage else 0
        with self._clock_lock:
            self._free_at = max(self._free_at, time.monotonic()) + tokens * self._seconds_per_token
            wait_seconds = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_seconds))
        return response


def paced(tokens_per_second: float) -> dict[str, Any]:
    """Audit a slow stub in real time."""
    server = PacedServer(StubModel(1), tokens_per_second)
    return {"tokens_per_second": tokens_per_second, **summary(audit(STUB_URL, transport=server.transport()))}


def summary(report: Report) -> dict[str, Any]:
    """Return the figures of one audit that are kept."""
    return {
        "verdict": str(report.verdict),
        "statement": report.statement(),
        "epsilon": report.epsilon,
        "drafts": [report.accepted_tokens, report.draft_tokens],
        "generated_tokens": report.generated_tokens,
        "prompt_tokens": report.prompt_tokens,
        "requests": report.requests,
        "seconds": round(report.seconds, 1),
        "tests": {r.test: str(r.status) for r in report.results},
        "findings": {r.test: [f.text for f in r.findings] for r in report.results if r.findings},
    }


def show(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Run one part."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("stubs", "paced", "ours"))
    parser.add_argument("--repetitions", type=int, default=100, help="audits of each fault")
    parser.add_argument("--honest", type=int, default=1000, help="audits of all honest variations together")
    parser.add_argument("--first", type=int, default=0, help="number of the first audit")
    parser.add_argument("--stubs", help="names of faults and variations separated by commas")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of `stubs`, at most")
    parser.add_argument("--speed", type=float, default=50, help="tokens a second of the paced stub")
    parser.add_argument("--budget", type=int, default=12_000)
    parser.add_argument("--cases", help="names of servers separated by commas")
    options = parser.parse_args()
    if options.part == "ours":
        from exactness.audit_servers import ours

        rows = []
        for name, report in ours(options.budget, options.cases.split(",") if options.cases else None):
            rows.append({"case": name, **summary(report)})
            show(f"{name}: {report.statement()} {rows[-1]['drafts']} {rows[-1]['seconds']} s")
        finish("audit", {"ours": rows})
        return
    if options.part == "paced":
        finish("audit", {"paced": paced(options.speed)})
        return
    names = options.stubs.split(",") if options.stubs else [*FAULTS, *VARIATIONS]
    made = stubs(names, options.repetitions, options.honest, options.first, options.workers, options.minutes)
    finish("audit", {"stubs": made})


if __name__ == "__main__":
    main()
