"""Power and false alarms of the audit itself, measured on stub servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftproof.audit.probes.result import Plan, Status
from draftproof.audit.report.verdict import Report
from draftproof.audit.runner import SUITES, audit
from draftproof.audit.stub.generate import HONEST, Fault
from draftproof.audit.stub.model import StubModel
from draftproof.audit.stub.server import StubServer

STUB_URL = "http://stub/v1"
REQUIRED_POWER = 0.99
SAMPLING_ALONE = ("sampling",)
ALL_BUT_SAMPLING = ("greedy", "replay", "rescoring", "options")


@dataclass(frozen=True)
class FaultCase:
    """One planted fault with the stages that must find it and their budget of sampled tokens."""

    title: str
    fault: Fault
    stages: tuple[str, ...]
    sampling_tokens: int = SUITES["quick"].sampling_tokens


FAULTS: Mapping[str, FaultCase] = {
    "topp_acceptance": FaultCase(
        "drafts inside the 0.8 nucleus are accepted", Fault(accepted_top_p=0.8), SAMPLING_ALONE, 5_000
    ),
    "bias_3_points": FaultCase(
        "the top-1 token is sampled 3 points too often", Fault(top1_bias=0.03), SAMPLING_ALONE, 5_000
    ),
    "bias_1_point": FaultCase(
        "the top-1 token is sampled 1 point too often", Fault(top1_bias=0.01), SAMPLING_ALONE, 40_000
    ),
    "noise_in_window": FaultCase(
        "all positions of a window use the same noise",
        Fault(is_noise_shared_in_window=True),
        SAMPLING_ALONE,
    ),
    "noise_of_requests": FaultCase(
        "all requests use the same noise", Fault(is_seed_ignored=True), SAMPLING_ALONE, 5_000
    ),
    "width": FaultCase(
        "logits depend on the number of requests", Fault(depends_on_width=True), ALL_BUT_SAMPLING
    ),
    "wrong_row": FaultCase(
        "logprobs of accepted drafts are those of another row",
        Fault(has_wrong_rows=True),
        SAMPLING_ALONE,
        5_000,
    ),
    "zero_logprobs": FaultCase(
        "accepted drafts have the logprob 0.0", Fault(has_zero_logprobs=True), SAMPLING_ALONE, 5_000
    ),
    "after_the_end": FaultCase(
        "stop strings and limits apply to whole windows", Fault(emits_after_end=True), ALL_BUT_SAMPLING
    ),
    "dropped_options": FaultCase(
        "options apply to the first token of a window", Fault(drops_options=True), ALL_BUT_SAMPLING
    ),
}

# Honest servers that differ in model, tokenizer and what they report.
VARIATIONS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "flat": {"sharpness": 0.4},
    "sharp": {"sharpness": 2.0},
    "small_vocabulary": {"vocab": 24},
    "large_vocabulary": {"vocab": 150},
    "hidden_end": {"reports_end": False},
    "chat_5_logprobs": {"is_chat_only": True, "max_top": 5},
    "rounded": {"decimals": 4},
    "no_seed": {"has_seed": False},
}


@dataclass
class Tally:
    """Simulated audits of one stub."""

    name: str
    title: str
    is_honest: bool
    budget_tokens: int
    audits: int = 0
    flagged: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        """Return whether the outcome is what the audit promises."""
        return self.flagged == 0 if self.is_honest else self.flagged >= REQUIRED_POWER * self.audits

    def add(self, report: Report) -> None:
        """Count one audit."""
        self.audits += 1
        self.flagged += is_flagged(report)
        self.tokens.append(report.generated_tokens + report.prompt_tokens)


def is_flagged(report: Report) -> bool:
    """Return whether an audit has any finding."""
    return any(result.status in (Status.VIOLATED, Status.DIFFERS) for result in report.results)


def audit_fault(name: str, number: int) -> Report:
    """Audit a stub with a planted fault; `number` selects model and noise."""
    case = FAULTS[name]
    server = StubServer(StubModel(number % 50), case.fault, entropy=number + 1)
    plan = replace(Plan(), sampling_tokens=case.sampling_tokens)
    return audit(STUB_URL, transport=server.transport(), only=case.stages, plan=plan)


def audit_honest(variation: str, number: int, plan: Plan | None = None) -> Report:
    """Audit an honest stub in full."""
    options = dict(VARIATIONS[variation])
    model = StubModel(number % 50, vocab=options.pop("vocab", 60), sharpness=options.pop("sharpness", 1.0))
    server = StubServer(model, HONEST, entropy=number + 1, **options)
    return audit(STUB_URL, transport=server.transport(), plan=plan)


def self_test(repetitions: int, on_case: Callable[[str], None] = lambda name: None) -> list[Tally]:
    """Audit every stub several times."""
    tallies = []
    for name, case in FAULTS.items():
        on_case(name)
        tally = Tally(name, case.title, False, case.sampling_tokens)
        for number in range(repetitions):
            tally.add(audit_fault(name, number))
        tallies.append(tally)
    for name in VARIATIONS:
        on_case(f"honest {name}")
        tally = Tally(f"honest {name}", "no fault", True, SUITES["quick"].sampling_tokens)
        for number in range(repetitions):
            tally.add(audit_honest(name, number))
        tallies.append(tally)
    return tallies
