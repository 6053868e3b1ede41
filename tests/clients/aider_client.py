"""Checks of aider, a coding client: a question about a file and an edit of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import API_KEY, BASE_URL, MODEL, run_checks

FOLDER = Path(tempfile.mkdtemp())
# The regex has the form of an edit and a choice of code: a small model does not keep to the form by itself.
EDIT = r"add\.py\n```\ndef (plus|minus|times)\(a, b\):\n    return a [+*-] b\n```\n"
CODE = "def add(a, b):\n    return a + b\n"


def aider(message: str, *words: str, **options: Any) -> str:
    """Run aider on one file, with options of its requests, and return its count of tokens."""
    settings = [{"name": f"openai/{MODEL}", "edit_format": "whole", "extra_params": options}]
    (FOLDER / "settings.yml").write_text(json.dumps(settings))
    (FOLDER / "add.py").write_text(CODE)
    command = [str(Path(sys.executable).parent / "aider"), "--model", f"openai/{MODEL}"]
    command += ["--model-settings-file", "settings.yml", "--openai-api-base", BASE_URL]
    command += ["--openai-api-key", API_KEY, "--no-git", "--yes-always", "--no-show-model-warnings"]
    command += ["--no-check-update", "--no-show-release-notes", "--analytics-disable", "--map-tokens", "0"]
    command += ["--no-pretty", "--no-detect-urls", "--message", message, *words, "add.py"]
    own = {**os.environ, "HOME": str(FOLDER), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=own, cwd=FOLDER, stdin=subprocess.DEVNULL
    )
    print(done.stdout, file=sys.stderr)
    assert done.returncode == 0 and "litellm." not in done.stdout, done.stdout[-400:] + done.stderr[-400:]
    sent = re.search(r"Tokens: (\S+) sent, (\S+) received", done.stdout)
    assert sent, done.stdout[-400:]
    return sent[0]


def question() -> str:
    """Send a question about the file; read a stream."""
    return aider("What does add do?", "--chat-mode", "ask", stop=["."])


def edit() -> str:
    """Request an edit, streamed; aider writes it to the file."""
    sent = aider("Rename the function to plus.", extra_body={"structured_outputs": {"regex": EDIT}})
    code = (FOLDER / "add.py").read_text()
    assert code != CODE and code.startswith("def ")
    return f"{sent}: {code}"


def edit_whole_response() -> str:
    """Request an edit without a stream."""
    aider("Rename the function.", "--no-stream", extra_body={"structured_outputs": {"regex": EDIT}})
    return (FOLDER / "add.py").read_text()


if __name__ == "__main__":
    run_checks(["aider-chat", "litellm"], [question, edit, edit_whole_response])
