"""Checks of one client: each is a function; its name, result and output are one line of JSON.

A script runs by hand too: `python tests/clients/openai_client.py http://127.0.0.1:8000 smollm2-135m`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

URL = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m"
BASE_URL = f"{URL}/v1"
API_KEY = "none"  # clients require one; the server does not
QUESTION = "What is the weather in Paris?"
MAX_ERROR_CHARACTERS = 400

WEATHER: dict[str, Any] = {  # JSON schema of the arguments of the tool
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Lima"]},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Return the weather.", "parameters": WEATHER},
}


def weather(city: str, unit: str) -> str:
    """Return the weather of a city."""
    return f"18 degrees {unit} in {city}, sunny"


def is_weather_call(arguments: str | dict[str, Any]) -> bool:
    """Return whether arguments follow the schema of the tool."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    properties = WEATHER["properties"]
    return set(found) == set(properties) and all(found[key] in properties[key]["enum"] for key in found)


def run_checks(packages: list[str], checks: list[Callable[[], Any]]) -> None:
    """Run the checks of a client, print a line of JSON for each and exit with 1 if one failed."""
    print(json.dumps({"packages": {name: version(name) for name in packages}}), flush=True)
    has_failed = False
    for check in checks:
        begin = time.perf_counter()
        line: dict[str, Any] = {"check": check.__name__}
        try:
            shown = asyncio.run(check()) if inspect.iscoroutinefunction(check) else check()
            line |= {"passed": True, "output": shown}
        except Exception as error:
            has_failed = True
            traceback.print_exc()
            line |= {"passed": False, "error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}
        print(json.dumps({**line, "seconds": round(time.perf_counter() - begin, 1)}, default=str), flush=True)
    sys.exit(has_failed)
