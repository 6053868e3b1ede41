"""Report as one HTML file without scripts."""

from __future__ import annotations

from html import escape

from draftproof.audit.probes.result import Result
from draftproof.audit.report.markdown import figures, summary
from draftproof.audit.report.verdict import Report, Verdict, curl

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f4b; --bad: #b3261e; --mid: #8a6d00;
  --dim: #777; }
@media (prefers-color-scheme: dark) {
  :root { --good: #5bd18f; --bad: #ff8a80; --mid: #e6c34a; --dim: #999; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.2rem; }
.verdict { font-size: 1.5rem; line-height: 1.3; padding: 1rem; border-left: .4rem solid currentColor; }
.exact, .consistent { color: var(--good); }
.lossy, .violated { color: var(--bad); }
.differs, .lossless { color: var(--mid); }
.not-testable, .inconclusive { color: var(--dim); }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .4rem .6rem .4rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
td:nth-child(2) { white-space: nowrap; }
small { color: var(--dim); display: block; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { color: var(--dim); }
dd { margin: 0; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .6rem;
  font-size: .8rem; }
"""
CLASSES = {
    Verdict.EXACT: "exact",
    Verdict.LOSSLESS: "lossless",
    Verdict.LOSSY: "lossy",
    Verdict.INCONCLUSIVE: "inconclusive",
}


def html(report: Report) -> str:
    """Return the page."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in summary(report))
    rows = "".join(_row(result) for result in report.results)
    found = "".join(
        f"<h3>{escape(result.test)}</h3><p>{escape(finding.text)}</p>"
        + "".join(f"<pre>{escape(curl(report.url, call))}</pre>" for call in finding.calls)
        for result in report.results
        for finding in result.findings
    )
    findings = f"<h2>Findings and how to reproduce them</h2>{found}" if found else ""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Audit of {escape(report.url)}</title><style>{STYLE}</style>"
        f"<h1>Is the speculation of this endpoint lossless?</h1>"
        f'<p class="verdict {CLASSES[report.verdict]}">{escape(report.statement())}</p><dl>{facts}</dl>'
        f"<table><tr><th>test<th>status<th>result</tr>{rows}</table>{findings}</html>\n"
    )


def _row(result: Result) -> str:
    """Return one line of the table."""
    status = str(result.status)
    return (
        f"<tr><td>{escape(result.test)}<small>{escape(result.title)}</small></td>"
        f'<td class="{status.replace(" ", "-")}">{status}</td>'
        f"<td>{escape(result.detail)}<small>{escape(figures(result))}</small></td></tr>"
    )
