"""A chat server whose replies are scripted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOLD = "hold"  # in place of a delta: wait until the client disconnects


def pieces(text: str, size: int = 5) -> list[dict[str, Any]]:
    """Return content deltas of a text."""
    return [{"content": text[i : i + size]} for i in range(0, len(text), size)]


def call(name: str, arguments: str, id: str = "call_1") -> list[dict[str, Any]]:
    """Return the deltas of a tool call, its arguments in two parts."""
    function = {"name": name, "arguments": ""}
    first = {"index": 0, "id": id, "type": "function", "function": function}
    half = len(arguments) // 2
    rest = [{"index": 0, "function": {"arguments": part}} for part in (arguments[:half], arguments[half:])]
    return [{"tool_calls": [each]} for each in (first, *rest)]


class ScriptedChat:
    """Address of the server, and the bodies that it received."""

    def __init__(self, url: str, bodies: list[Any]) -> None:
        self.url, self.bodies = url, bodies


@contextmanager
def scripted_chat(replies: Sequence[Any]) -> Iterator[ScriptedChat]:
    """Serve the replies in order: lists of deltas, or a text that becomes an error 400."""
    bodies: list[Any] = []
    remaining = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, b'{"engine": "scripted model"}')

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            reply = remaining.pop(0)
            if isinstance(reply, str):
                self._send(400, json.dumps({"error": {"message": reply}}).encode())
                return
            self.send_response(200)
            self.end_headers()
            for delta in reply:
                if delta == HOLD:
                    self.wfile.flush()
                    self.connection.recv(1)  # returns when the client disconnects
                    return
                self._event([{"index": 0, "delta": delta, "finish_reason": None, **EXTRAS}])
            reason = "tool_calls" if any("tool_calls" in delta for delta in reply) else "stop"
            self._event([{"index": 0, "delta": {}, "finish_reason": reason}])
            self._event([], usage={"prompt_tokens": 7, "completion_tokens": len(reply)})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, choices: list[Any], **more: Any) -> None:
            self.wfile.write(b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n")

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield ScriptedChat(f"http://127.0.0.1:{server.server_port}", bodies)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


EXTRAS = {"token_ids": [1], "provenance": ["plain"], "step_end": True}
