"""Environments of the clients, one each: their requirements exclude each other. None of them needs torch."""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

HERE = Path(__file__).parent

# the first package of each is the client
PYTHON_CLIENTS = {
    "openai": ["openai==3.49.0"],
    "anthropic": ["anthropic==2.8.0"],
    "langchain": ["langchain-openai==1.7.3"],
    "llama_index": ["llama-index-llms-openai-like==0.8.1"],
    "instructor": ["instructor==1.17.0"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]==2.66.0"],
    "litellm": ["litellm==1.106.2", "mcp==2.3.0"],  # litellm imports mcp where a request has tools
    "llm": ["llm==0.36"],
    "aider": ["aider-chat==0.86.2"],
}
NODE_CLIENTS = {
    "openai_node": "openai_node.mjs",
    "anthropic_node": "anthropic_node.mjs",
    "ai_sdk": "ai_sdk.mjs",
}
# transformers is here for lm-eval's imports only; newer versions of guidellm need torch
TOOLS = {
    "lm_eval": ["lm-eval==0.4.13", "transformers==5.17.0", "tenacity", "tiktoken"],
    "guidellm": ["guidellm==0.3.1"],
    "schemathesis": ["schemathesis==4.32.5"],
}
NAMES = [*PYTHON_CLIENTS, *NODE_CLIENTS, *TOOLS]


def python_environment(folder: Path, name: str) -> Path:
    """Return the folder with the programs of a client; install it if it is missing."""
    own = folder / name
    if not (own / "bin" / "python").exists():
        venv.create(own, with_pip=True)
        packages = (PYTHON_CLIENTS | TOOLS)[name]
        pip = [str(own / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
    return own / "bin"


def node_environment(folder: Path) -> Path:
    """Return a folder with the scripts for JavaScript beside the packages that they import."""
    own = folder / "node"
    own.mkdir(parents=True, exist_ok=True)
    for path in [*HERE.glob("*.mjs"), HERE / "package.json"]:
        shutil.copy(path, own)
    if not (own / "node_modules").exists():
        npm = ["npm", "install", "--silent", "--no-package-lock", "--no-fund", "--no-audit"]
        subprocess.run(npm, cwd=own, check=True)
    return own
