"""Copy-heavy traffic of a coding agent: an edit through a tool call, and a conversation about one module.

The replies are fixed texts. A model of this size does not follow such instructions, so a benchmark forces
them with a logits processor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("agent_file.txt").read_text()
EDITS = (
    ("LOW_STOCK = 5\n", "LOW_STOCK = 10\n"),
    ("        limit = self.day + timedelta(days=30)\n", "        limit = self.day + timedelta(days=14)\n"),
    ('            raise ValueError("count must be positive")\n', "            raise StockError(sku)\n"),
    (
        "        made = self.orders.pop(number)\n",
        "        made = self.orders.pop(number, None)\n        if made is None:\n"
        '            raise StockError(f"there is no order {number}")\n',
    ),
    ("    path.write_text(json.dumps(rows, indent=2))\n", "    path.write_text(json.dumps(rows))\n"),
)
TASK = (
    "In stock.py raise LOW_STOCK to 10, let invoices be due after 14 days, raise StockError for a count that "
    "is not positive and for an order to cancel that does not exist, and write the orders without an indent."
)
TOOLS = (
    "You edit files with the functions read_file(path) and write_file(path, content). Write a call as "
    '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
)
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the conversation so far and the reply."""

    messages: list[Message]
    reply: str


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def edited_file() -> str:
    """Return the file with all edits."""
    text = FILE
    for old, new in EDITS:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def edit_turns(is_json_result: bool) -> list[Turn]:
    """Return the turn that writes the edited file.

    `is_json_result`: the tool returned the file as JSON, as most agent frameworks do, so that line ends are
    escaped as in the arguments of the call; otherwise as text.
    """
    result = json.dumps({"path": "stock.py", "content": FILE}) if is_json_result else FILE
    messages = [
        {"role": "system", "content": TOOLS},
        {"role": "user", "content": TASK},
        {"role": "assistant", "content": _call("read_file", path="stock.py")},
        {"role": "tool", "content": result},
    ]
    return [Turn(messages, _call("write_file", path="stock.py", content=edited_file()))]


START = '''"""Cache of pages on disk."""

import hashlib
import time
from pathlib import Path


class PageCache:
    """Pages by address, one file each."""

    def __init__(self, folder: Path, max_age: float = 3600.0) -> None:
        self.folder = folder
        self.max_age = max_age
        self.folder.mkdir(parents=True, exist_ok=True)

    def path_of(self, url: str) -> Path:
        """Return the file of a page."""
        digest = hashlib.sha256(url.encode()).hexdigest()
        return self.folder / digest[:32]

    def get(self, url: str) -> bytes | None:
        """Return a page, or None if it is missing or too old."""
        path = self.path_of(url)
        if not path.exists():
            return None
        if time.time() - path.stat().st_mtime > self.max_age:
            path.unlink()
            return None
        return path.read_bytes()

    def put(self, url: str, data: bytes) -> None:
        """Store a page."""
        self.path_of(url).write_bytes(data)
'''
GET = START[START.index("    def get") : START.index("    def put")].rstrip()
PUT = START[START.index("    def put") :].rstrip()
COUNTED_GET = GET.replace("            return None", "            self.misses += 1\n            return None")
COUNTED_GET = COUNTED_GET.replace(
    "        return path.read_bytes()", "        self.hits += 1\n        return path.read_bytes()"
)
ATOMIC_PUT = PUT.replace(
    "        self.path_of(url).write_bytes(data)",
    "        path = self.path_of(url)\n        partial = path.with_suffix('.part')\n"
    "        partial.write_bytes(data)\n        partial.replace(path)",
)
PURGE = '''    def purge(self) -> int:
        """Remove pages that are too old; return their number."""
        removed = 0
        for path in self.folder.iterdir():
            if time.time() - path.stat().st_mtime > self.max_age:
                path.unlink()
                removed += 1
        return removed'''
COUNTED = START.replace(GET, COUNTED_GET).replace(
    "        self.max_age = max_age\n",
    "        self.max_age = max_age\n        self.hits = 0\n        self.misses = 0\n",
)
ATOMIC = COUNTED.replace(PUT, ATOMIC_PUT)
WHOLE = ATOMIC.rstrip() + "\n\n" + PURGE + "\n"
RENAMED = WHOLE.replace("max_age", "ttl_seconds")


def _code(text: str) -> str:
    return f"```python\n{text.rstrip()}\n```"


DIALOGUE = (
    (
        f"This is cache.py:\n{_code(START)}\nLet get count hits and misses. Show the class.",
        f"`get` now counts both, and the counters start at 0:\n{_code(COUNTED)}",
    ),
    ("Show get alone again, please.", f"Here it is:\n{_code(COUNTED_GET)}"),
    (
        "A reader may see half a page while put writes it. Fix put.",
        "Write to another file first and rename it, which is atomic on one file system:\n"
        f"{_code(ATOMIC_PUT)}",
    ),
    ("Add a method that removes old pages.", f"It uses the same test as `get`:\n{_code(PURGE)}"),
    ("Now the whole file with all of this.", f"The whole file:\n{_code(WHOLE)}"),
    (
        "Rename max_age to ttl_seconds everywhere.",
        f"Renamed in the constructor, in `get` and in `purge`:\n{_code(RENAMED)}",
    ),
    (
        "Does purge count as a miss? Show me the two methods side by side.",
        "No, only `get` changes the counters:\n"
        + _code(
            COUNTED_GET.replace("max_age", "ttl_seconds") + "\n\n" + PURGE.replace("max_age", "ttl_seconds")
        ),
    ),
    (
        "Let purge skip the files that put has not finished.",
        "Files that end in `.part` are skipped:\n"
        + _code(
            PURGE.replace("max_age", "ttl_seconds").replace(
                "        for path in self.folder.iterdir():\n",
                "        for path in self.folder.iterdir():\n            if path.suffix == '.part':\n"
                "                continue\n",
            )
        ),
    ),
)


def dialogue_turns() -> list[Turn]:
    """Return the eight turns of a conversation whose replies repeat earlier code."""
    messages: list[Message] = [{"role": "system", "content": "You are a careful programmer."}]
    turns = []
    for question, reply in DIALOGUE:
        messages = [*messages, {"role": "user", "content": question}]
        turns.append(Turn(messages, reply))
        messages = [*messages, {"role": "assistant", "content": reply}]
    return turns


TASKS = {
    "edit": lambda: edit_turns(is_json_result=True),
    "edit_text_result": lambda: edit_turns(is_json_result=False),
    "conversation": dialogue_turns,
}
