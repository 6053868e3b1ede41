"""Power and false alarms of the audit itself, measured on stub servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftproof.audit.probes.result import Plan, Status
from draftproof.audit.report.verdict import Report
from draftproof.audit.runner import SUITES, audit
from draftproof.audit.stub.generate import HONEST, Fault, Sampler
from draftproof.audit.stub.model import StubModel, Tokenizer
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
    **{
        f"noise_in_window_{sampler}": FaultCase(
            f"all positions of a window use the same noise (sampler: {sampler})",
            Fault(shared_noise=sampler),
            SAMPLING_ALONE,
            20_000 if sampler is Sampler.RACE else 5_000,
        )
        for sampler in Sampler
    },
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
    "processed": {"reports_processed": True},
    "sentencepiece": {"tokenizer": Tokenizer.SENTENCEPIECE},
    "no_spaces": {"tokenizer": Tokenizer.NO_SPACES},
    "equal_texts": {"tokenizer": Tokenizer.EQUAL_TEXTS},
    "inexact": {"is_exact": False},
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
        self.flagged += is_flagged(report, self.is_honest and not VARIATIONS[self.name].get("is_exact", True))
        self.tokens.append(report.generated_tokens + report.prompt_tokens)


def is_flagged(report: Report, is_inexact: bool = False) -> bool:
    """Return whether an audit has any finding; outputs of an inexact server may differ."""
    findings = (Status.VIOLATED,) if is_inexact else (Status.VIOLATED, Status.DIFFERS)
    return report.stop_reason is not None or any(result.status in findings for result in report.results)


def tally_of(name: str) -> Tally:
    """Return an empty tally of a fault or an honest variation."""
    if name in FAULTS:
        return Tally(name, FAULTS[name].title, False, FAULTS[name].sampling_tokens)
    return Tally(name, "no fault", True, SUITES["quick"].sampling_tokens)


def audit_stub(name: str, number: int) -> Report:
    """Audit a stub by the name of its fault or variation."""
    return audit_fault(name, number) if name in FAULTS else audit_honest(name, number)


def audit_fault(name: str, number: int) -> Report:
    """Audit a stub with a planted fault; `number` selects model and noise."""
    case = FAULTS[name]
    server = StubServer(StubModel(number % 50), case.fault, entropy=number + 1)
    plan = replace(Plan(), sampling_tokens=case.sampling_tokens)
    return audit(STUB_URL, transport=server.transport(), only=case.stages, plan=plan)


def audit_honest(variation: str, number: int, plan: Plan | None = None) -> Report:
    """Audit an honest stub in full."""
    options = dict(VARIATIONS[variation])
    shape = {name: options.pop(name) for name in ("vocab", "sharpness", "tokenizer") if name in options}
    model = StubModel(number % 50, **shape)
    server = StubServer(model, HONEST, entropy=number + 1, **options)
    return audit(STUB_URL, transport=server.transport(), plan=plan)


def self_test(repetitions: int, on_case: Callable[[str], None] = lambda name: None) -> list[Tally]:
    """Audit every stub several times."""
    tallies = [tally_of(name) for name in (*FAULTS, *VARIATIONS)]
    for tally in tallies:
        on_case(f"honest {tally.name}" if tally.is_honest else tally.name)
        for number in range(repetitions):
            tally.add(audit_stub(tally.name, number))
    return tallies
