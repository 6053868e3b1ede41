"""Clients of other projects, unchanged, against `draftproof serve`: each check, its output and the versions.

    python tests/clients/run.py [--only openai langchain ...] [--url URL] [--environments FOLDER]

Every client has an environment of its own under FOLDER, which is made if it is missing. Its output is written
to bench/results/clients/NAME.txt, and the results of this run are merged into bench/results/clients/cpu.json.
With --url the commit in it is that of the scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path.insert(0, str(REPO / "bench"))

from common.measure import commit, hardware  # noqa: E402
from common.serving.server_process import served  # noqa: E402
from environments import NAMES, NODE_CLIENTS, TOOLS, node_environment, python_environment  # noqa: E402
from tools import run_tool  # noqa: E402

CLIENT_SECONDS = 1800


def client_command(name: str, folder: Path) -> list[str]:
    """Return the command that runs the checks of a client; install the client if it is missing."""
    if name in NODE_CLIENTS:
        return ["node", str(node_environment(folder) / NODE_CLIENTS[name])]
    return [str(python_environment(folder, name) / "python"), str(HERE / f"{name}_client.py")]


def run_client(name: str, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the checks of a client, write its output to a file and return the results."""
    command = [*client_command(name, options.environments), url, options.model]
    settings = {**os.environ, "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=CLIENT_SECONDS)
    text = "".join(line for line in done.stdout.splitlines(keepends=True) if line.startswith("{"))
    lines = [json.loads(line) for line in text.splitlines()]
    kept = f"$ {Path(command[1]).name} URL {options.model}\n{text}--- standard error\n{done.stderr}"
    for path, shown in ((options.environments, "ENVIRONMENTS"), (REPO, "."), (Path.home(), "~")):
        kept = kept.replace(str(path), shown)
    kept = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|/tmp/\S+?(?=/)", "", kept)
    (options.results / f"{name}.txt").write_text(kept)
    packages = lines[0]["packages"] if lines else {}  # none: the script did not start
    checks = {line["check"]: line["passed"] for line in lines[1:]}
    return {"passed": bool(checks) and done.returncode == 0, "packages": packages, "checks": checks}


def keep(name: str, result: dict[str, Any], folder: Path) -> bool:
    """Print a result, write it beside those of the other clients and return whether it passed."""
    print(name, json.dumps(result), flush=True)
    path = folder / "cpu.json"
    clients = json.loads(path.read_text())["clients"] if path.exists() else {}
    clients[name] = {"commit": commit(), "hardware": hardware(), **result}
    path.write_text(json.dumps({"bench": "clients", "clients": clients}, indent=1) + "\n")
    return bool(result["passed"])


def main() -> None:
    """Run the chosen clients and tools."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="server to use; one is started unless given")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--environments", type=Path, default=REPO / ".clients")
    parser.add_argument("--results", type=Path, default=REPO / "bench" / "results" / "clients")
    parser.add_argument("--requests", type=int, default=24, help="of guidellm, at each concurrency")
    parser.add_argument("--examples", type=int, default=300, help="of schemathesis, for each route")
    parser.add_argument("--fuzz-seconds", type=int, default=600)
    options = parser.parse_args()
    options.environments, options.results = options.environments.resolve(), options.results.resolve()
    options.results.mkdir(parents=True, exist_ok=True)
    clients = [name for name in options.only if name not in TOOLS]
    tools = [name for name in options.only if name in TOOLS]
    passed = []
    with ExitStack() as stack:
        url = options.url
        if clients and url is None:
            # the template of the default model has no tools, so that no format of calls is detected
            url = stack.enter_context(served(options.model, "--tool-call-parser", "hermes")).url
        for name in clients:
            passed.append(keep(name, run_client(name, url, options), options.results))
    for name in tools:
        version = {"packages": dict([TOOLS[name][0].split("==")])}
        result = run_tool(name, options, python_environment(options.environments, name))
        passed.append(keep(name, version | result, options.results))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
