"""Whole audits of stub servers: honest ones, planted faults, reports, resumed runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftproof.audit import Report, Verdict, audit
from draftproof.audit.probes.result import Plan, Status
from draftproof.audit.report.html import html
from draftproof.audit.report.markdown import markdown
from draftproof.audit.self_test import FAULTS, STUB_URL, audit_fault, audit_honest, is_flagged
from draftproof.audit.stub.generate import Fault
from draftproof.audit.stub.model import StubModel
from draftproof.audit.stub.server import StubServer
from draftproof.errors import RequestError

SMALL = Plan(sampling_tokens=3_000, greedy_prompts=2, rescored_answers=1, neighbours=8)
QUICK_FAULTS = [name for name, case in FAULTS.items() if not case.fault.top1_bias]


def faulty(fault: Fault, **options: object) -> Report:
    """Audit a stub with a fault."""
    server = StubServer(StubModel(3), fault, entropy=5)
    return audit(STUB_URL, transport=server.transport(), **{"plan": SMALL, **options})  # type: ignore[arg-type]


def test_honest_stub_is_exact() -> None:
    """Check verdict, every equality test and the cost of an audit."""
    report = audit_honest("default", 1, SMALL)
    assert report.verdict is Verdict.EXACT, markdown(report)
    assert not is_flagged(report) and report.stop_reason is None
    assert report.generated_tokens + report.prompt_tokens < 9_000
    assert {r.test for r in report.results if r.status is Status.EXACT} >= {
        "greedy", "replay", "neighbours", "rescoring", "streaming", "stop", "logit_bias", "agreement",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("variation", "number"),
    [("hidden_end", 2), ("chat_5_logprobs", 2), ("rounded", 2), ("no_seed", 2), ("equal_texts", 1),
     ("processed", 0), ("inexact", 13)],
)  # fmt: skip
def test_honest_variations_are_not_flagged(variation: str, number: int) -> None:
    report = audit_honest(variation, number, replace(SMALL, sampling_tokens=1_500))
    assert not is_flagged(report, is_inexact=variation == "inexact"), markdown(report)


@pytest.mark.control
@pytest.mark.parametrize("name", QUICK_FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    report = audit_fault(name, 1)
    assert is_flagged(report), markdown(report)
    if name == "width":  # not reproducible is not lossy
        assert not report.violations and report.result("neighbours").status is Status.DIFFERS
    else:
        assert report.verdict is Verdict.LOSSY


def test_what_is_not_offered_is_named() -> None:
    """Check that missing seeds and routes are not testable and never a violation."""
    report = audit_honest("no_seed", 1, replace(SMALL, sampling_tokens=1_500))
    assert any("seed" in text for text in report.missing)
    assert report.result("replay").status is Status.NOT_TESTABLE
    assert report.result("json_schema").status is Status.NOT_TESTABLE
    assert report.verdict is not Verdict.EXACT and not report.violations


def test_reports_have_figures_and_commands() -> None:
    """Check the three forms of a report of a lossy stub."""
    report = faulty(Fault(accepted_top_p=0.8), only=["sampling"])
    data = json.loads(json.dumps(report.as_json()))
    (drafts,) = (test for test in data["tests"] if test["test"] == "drafts")
    assert data["verdict"] == "lossy" and drafts["status"] == "violated"
    assert drafts["e_value"] > drafts["threshold"] and drafts["p_value"] < 0.001
    assert drafts["findings"][0]["reproduce"][0].startswith("curl -s http://stub/v1/completions")
    assert "**lossy: " in markdown(report) and "<pre>curl" in html(report)


def test_stopped_audit_continues(tmp_path: Path) -> None:
    """Check that stored answers are used again and give the same report."""
    file = tmp_path / "answers.jsonl"
    transport = StubServer(StubModel(3), entropy=5).transport()
    plan = replace(SMALL, sampling_tokens=1_000)
    first = audit(STUB_URL, transport=transport, plan=plan, resume=file, only=["greedy", "sampling"])
    size = file.stat().st_size
    with file.open("a") as out:
        out.write('{"key": "broken')
    second = audit(STUB_URL, transport=None, plan=plan, resume=file, only=["greedy", "sampling"])
    assert [r.detail for r in first.results] == [r.detail for r in second.results]
    assert size > 1000 and file.read_text().endswith("broken\n"), "the next answer has a line of its own"


@pytest.mark.parametrize("stages", [["sampling"], ["greedy", "options", "sampling"]])
def test_sampling_uses_what_the_other_stages_leave(stages: list[str]) -> None:
    """Check the tokens of an audit with a budget, to one batch of sampled answers."""
    plan = replace(SMALL, sampling_tokens=500, budget_tokens=5_000)
    transport = StubServer(StubModel(3), entropy=5).transport()
    report = audit(STUB_URL, transport=transport, plan=plan, only=stages)
    assert 5_000 <= report.generated_tokens + report.prompt_tokens < 6_200


def test_wrong_options_are_refused() -> None:
    with pytest.raises(RequestError, match="did you mean 'greedy'"):
        audit(STUB_URL, only=["gredy"])
    with pytest.raises(RequestError, match="too small"):
        audit(STUB_URL, budget_tokens=100)
    with pytest.raises(RequestError, match="HOST:PORT"):
        audit("ftp://x")
