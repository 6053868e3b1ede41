"""A signal ends the server whenever it comes, also in the moment between its banner and its loop."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from draftproof import AsyncLLM
from draftproof.serve.api.metrics import ServerMetrics
from draftproof.serve.http.server import serve
from draftproof.serve.settings import Settings
from serving import make_folder, tiny


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_right_after_the_banner(tmp_path: Path, number: signal.Signals) -> None:
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}
    llm = AsyncLLM.from_llm(tiny(make_folder(tmp_path)))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            metrics = ServerMetrics(llm, "tiny", False)
            serve(llm, Settings(), listener, metrics, ready=lambda: signal.raise_signal(number))  # returns
    finally:
        llm._finalizer()
        for kind, handler in before.items():
            signal.signal(kind, handler)
