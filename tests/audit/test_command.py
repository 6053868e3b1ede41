"""The command `draftproof audit`, the pytest plug-in, and the audit of this server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import draftproof
from draftproof.audit import Verdict, audit
from draftproof.audit.probes.result import Plan, Status
from draftproof.audit.report.markdown import markdown
from draftproof.cli.main import main
from serving import NGRAM, Served, make_folder, serving, tiny

PLAN = Plan(
    greedy_prompts=2,
    greedy_tokens=16,
    replayed_tokens=16,
    neighbours=8,
    neighbour_tokens=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(tiny(folder, NGRAM, debug=False)) as found:
        yield found


def test_this_server_is_exact(served: Served) -> None:
    """Check greedy outputs, seeds, neighbours and the switch on this server with n-gram drafts."""
    report = audit(served.url, plan=PLAN, only=["greedy", "replay"])
    assert not report.violations and report.stop_reason is None, markdown(report)
    for test in ("greedy", "greedy_repeat", "replay", "neighbours", "switch", "agreement"):
        assert report.result(test).status is Status.EXACT, markdown(report)
    assert report.accepted_tokens, "no draft was accepted: the audit has tested nothing"


@pytest.mark.control
@pytest.mark.parametrize("fields", [{"verify_strategy": "topp"}, {"accept_policy": "accept_all"}])
def test_lossy_verification_is_found(folder: Path, fields: dict[str, Any]) -> None:
    with serving(tiny(folder, {**NGRAM, **fields}, debug=False)) as served:
        report = audit(served.url, plan=Plan(sampling_tokens=8_000, answer_tokens=96), only=["sampling"])
    assert report.verdict is Verdict.LOSSY, markdown(report)


def test_command_writes_reports(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the table, the files and the exit status on the chat route."""
    files = {name: tmp_path / f"report.{name}" for name in ("json", "markdown", "html")}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    status = main(["audit", served.url, "--only", "greedy", "--api", "chat", "--concurrency", "2", *flags])
    output = capsys.readouterr().out
    assert status == 3 and "inconclusive" in output and "greedy_repeat" in output
    data = json.loads(files["json"].read_text())
    assert data["tests"][0]["status"] == "exact" and data["tokens"]["generated"] > 0
    assert (
        files["markdown"].read_text().startswith("# Audit") and "<!doctype html>" in files["html"].read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "URL is missing"),
        (["http://x/v1", "--body", "[1]"], "must be a JSON object"),
        (["http://x/v1", "--key-env", "NO_SUCH_KEY_HERE"], "the environment has no"),
        (["http://x/v1", "--concurrency", "0"], "at least 1"),
        (["http://x/v1", "--rate", "-1"], "--rate must be larger than 0"),
        (["http://x/v1", "--timeout", "nan"], "--timeout must be larger than 0"),
        (["http://x/v1", "--html", "no/such/folder/report.html"], "a folder that exists"),
        (["http://x/v1", "--against-model", "m"], "give its URL with --against too"),
        (["http://x/v1", "--resume", "."], "cannot be written"),
        (["http://[::1/v1"], "HOST:PORT"),
        (["http://x:port/v1"], "HOST:PORT"),
        (["http://user:secret@x/v1"], "use --key-env"),
        (["--self-test", "--repetitions", "0"], "at least 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_pytest_plugin_skips_without_a_url(tmp_path: Path) -> None:
    """Check that a test with the fixture is collected, and skipped without an endpoint."""
    (tmp_path / "test_it.py").write_text(
        "def test_it(audit_report):\n    assert not audit_report.violations\n"
    )
    names = {point.name for point in entry_points(group="pytest11")}
    plugin = [] if "draftproof_audit" in names else ["-p", "draftproof.audit.pytest_plugin"]
    paths = {**os.environ, "PYTHONPATH": str(Path(draftproof.__file__).parent.parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=paths)
    assert done.returncode == 0 and "1 skipped" in done.stdout, done.stdout + done.stderr
