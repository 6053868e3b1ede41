"""JSON log, one object a line. Prompts are not logged unless the operator enables it.

Lines that cannot be written (a full disk, a closed pipe) are dropped; requests are not affected.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from draftproof.errors import ConfigError

NO_KEY = "-"  # name of the key of requests without one
LOGGER = logging.getLogger("draftproof.serve")


class JsonFormatter(logging.Formatter):
    """Formatter with time, level, logger, message and the fields of `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def configure_logging(level: str, path: str | None) -> None:
    """Configure the logging of the whole process, uvicorn included."""
    try:
        handler = logging.StreamHandler(sys.stderr) if path is None else logging.FileHandler(path)
    except OSError as error:
        raise ConfigError(f"the log {path} cannot be written: {error.strerror}") from error
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.raiseExceptions = False  # errors of logging itself would fill standard error
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("uvicorn.access").disabled = True  # RequestRecord writes the access log
    threading.excepthook = log_thread_failure


def log_thread_failure(args: threading.ExceptHookArgs) -> None:
    """Log an exception that ends a thread; Python would print it between the lines of the log."""
    if args.exc_type is SystemExit:
        return
    name = "" if args.thread is None else args.thread.name
    failure = (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    LOGGER.error("a thread failed", exc_info=failure, extra={"fields": {"thread": name}})


@dataclass(slots=True)
class RequestRecord:
    """Record of one HTTP request for the access log."""

    id: str
    method: str
    path: str
    started: float
    key: str = NO_KEY  # short name of the API key
    status: int = 0
    fields: dict[str, Any] = field(default_factory=dict)

    def write(self, seconds: float) -> None:
        """Write the line of a request that took `seconds`."""
        fields = {
            "request_id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "key": self.key,
            "seconds": round(seconds, 6),
            **self.fields,
        }
        is_probe = self.method == "GET" and self.status < 400  # health checks come every few seconds
        level = logging.ERROR if self.status >= 500 else logging.DEBUG if is_probe else logging.INFO
        LOGGER.log(level, "request", extra={"fields": fields})
