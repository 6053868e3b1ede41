"""Checks of the `llm` command: prompts, streams, schemas, tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE_URL, MODEL, QUESTION, WEATHER, is_weather_call, run_checks

FOLDER = Path(tempfile.mkdtemp())
MODELS = f"""
- {{model_id: own, model_name: {MODEL}, api_base: "{BASE_URL}", supports_schema: true, supports_tools: true}}
- {{model_id: own-text, model_name: {MODEL}, api_base: "{BASE_URL}", completion: true}}
"""
FUNCTION = 'def get_weather(city: str) -> str:\n    """Return the weather."""\n    return "sunny"\n'


def llm(*words: str) -> str:
    """Run the command and return what it prints."""
    (FOLDER / "extra-openai-models.yaml").write_text(MODELS)
    command = [str(Path(sys.executable).parent / "llm"), *words]
    settings = {**os.environ, "LLM_USER_PATH": str(FOLDER), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def prompt() -> str:
    """Print a whole message."""
    return llm("-m", "own", QUESTION, "--no-stream", "-o", "temperature", "0", "-o", "max_tokens", "24")


def stream() -> str:
    """Compare a stream with the whole message."""
    text = llm("-m", "own", QUESTION, "-o", "temperature", "0", "-o", "max_tokens", "24")
    assert text == prompt()
    return text


def completion() -> str:
    """Complete a prompt."""
    return llm(
        "-m", "own-text", "The capital of France is", "-o", "max_tokens", "8", "-o", "temperature", "0"
    )


def schema() -> str:
    """Print an object that follows a schema."""
    text = llm("-m", "own", QUESTION, "--schema", json.dumps(WEATHER), "-o", "temperature", "0")
    assert is_weather_call(text)
    return text


def tools() -> str:
    """Offer a function; a small model seldom calls it by itself."""
    return llm(
        "-m", "own", QUESTION, "--functions", FUNCTION, "-o", "max_tokens", "24", "-o", "temperature", "0"
    )


if __name__ == "__main__":
    run_checks(["llm", "openai"], [prompt, stream, completion, schema, tools])
