"""Report as Markdown."""

from __future__ import annotations

from draftproof.audit.probes.result import Result
from draftproof.audit.report.verdict import Report, curl


def figures(result: Result) -> str:
    """Return e-value, threshold and smallest bias of a test in one cell."""
    if result.e_value is None or result.threshold is None:
        return ""
    value = f"{result.e_value:.3g}" if result.e_value < 1e6 else "> 1e6"
    text = f"e = {value} (rejects at {result.threshold:,.0f})"
    if result.smallest_bias is not None:
        text += f"; finds {100 * result.smallest_bias:.1f} points"
    return text


def summary(report: Report) -> list[tuple[str, str]]:
    """Return the facts above the table."""
    rows = [
        ("endpoint", report.url),
        ("model", report.model),
        ("when", f"{report.started}, {report.seconds:.0f} s"),
        (
            "cost",
            f"{report.generated_tokens:,} generated and {report.prompt_tokens:,} prompt tokens, "
            f"{report.requests} requests",
        ),
        ("draftproof", f"{report.version}, suite {report.suite}"),
    ]
    if report.draft_tokens is not None:
        rows.append(("drafts", f"{report.accepted_tokens:,} of {report.draft_tokens:,} accepted (reported)"))
    else:
        rows.append(("drafts", "not reported by the endpoint"))
    rows += [("not offered", text) for text in report.missing]
    if report.stop_reason:
        rows.append(("stopped", report.stop_reason))
    return rows


def markdown(report: Report) -> str:
    """Return the whole report."""
    lines = ["# Audit", "", f"**{report.statement()}**", ""]
    lines += [f"- {name}: {value}" for name, value in summary(report)]
    lines += ["", "| test | status | what it requires | result | figures |", "|---|---|---|---|---|"]
    for result in report.results:
        cells = (result.test, str(result.status), result.title, result.detail, figures(result))
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    for result in report.results:
        for finding in result.findings:
            lines += ["", f"**{result.test}**: {finding.text}", "", "```"]
            lines += [curl(report.url, call) for call in finding.calls]
            lines.append("```")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return text that does not end a cell."""
    return text.replace("|", "\\|").replace("\n", " ")
