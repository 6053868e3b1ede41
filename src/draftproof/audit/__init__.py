"""Black-box audit of OpenAI-compatible endpoints for lossless speculation.

The package imports nothing of the engine. `audit(url)` returns a report.
"""

from draftproof.audit.report.verdict import Report, Verdict
from draftproof.audit.runner import audit

__all__ = ["Report", "Verdict", "audit"]
