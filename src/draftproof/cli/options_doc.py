"""Writer of the option table in docs/options.md: `python -m draftproof.cli.options_doc FILE`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from draftproof.config import options_table

MARKED_TABLE = re.compile(r"(<!-- engine options:[^\n]*-->\n\n).*?(\n<!-- end -->)", re.S)


def with_table(text: str) -> str:
    """Return a document with its option table replaced by the one of `EngineConfig`."""
    return MARKED_TABLE.sub(lambda match: match[1] + options_table() + match[2], text)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))
