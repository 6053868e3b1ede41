"""Logs as JSON, one object a line. What clients say is not in them unless the operator wants it.

A log that cannot be written (a full disk, a closed pipe) is lost; no request is.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from draftproof.errors import ConfigError

LOGGER = logging.getLogger("draftproof.serve")


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, and whatever `extra={"facts": {…}}` adds."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def set_up(level: str, path: str | None) -> None:
    """The whole process logs this way, uvicorn included."""
    try:
        handler = logging.StreamHandler(sys.stderr) if path is None else logging.FileHandler(path)
    except OSError as error:
        raise ConfigError(f"the log {path} cannot be written: {error.strerror}") from error
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.raiseExceptions = False  # a full disk is no reason to fill another log
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("uvicorn.access").disabled = True  # every request has a line of its own here


@dataclass(slots=True)
class Ticket:
    """One HTTP request, from its first byte to its line in the log."""

    id: str
    method: str
    path: str
    started: float
    key: str = "-"  # whose it is: the short name of an API key
    status: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, seconds: float) -> None:
        facts = {
            "request_id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "key": self.key,
            "seconds": round(seconds, 6),
            **self.facts,
        }
        quiet = self.method == "GET" and self.status < 400  # somebody asks every few seconds
        level = logging.ERROR if self.status >= 500 else logging.DEBUG if quiet else logging.INFO
        LOGGER.log(level, "request", extra={"facts": facts})
