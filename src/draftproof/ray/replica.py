"""Replica of the engine: a supervised worker process and the ASGI application of `draftproof serve`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from starlette.types import Message

from draftproof.errors import EngineDeadError
from draftproof.metrics import Histogram
from draftproof.ray.event_endpoints import with_endpoints_of_replica
from draftproof.ray.metrics import MetricExporter
from draftproof.ray.routed_request import RoutedRequest
from draftproof.serve.api.metrics import ServerMetrics
from draftproof.serve.http.app import create_app
from draftproof.serve.http.request_log import configure_logging
from draftproof.serve.ipc.remote_llm import connect
from draftproof.serve.settings import Settings
from draftproof.serve.supervisor import Supervisor


class EngineReplica:
    """Deployment class with one engine. The engine's process and its ranks end with the replica."""

    def __init__(self, model: str, engine: dict[str, Any], settings: Settings, log_level: str) -> None:
        configure_logging(log_level, None)
        own = with_endpoints_of_replica(engine, serve.get_replica_context().rank.local_rank)
        self._supervisor = Supervisor(model, log_level=log_level.upper(), **own).start()
        steps = Histogram()
        self._llm = connect(self._supervisor.address, on_step=steps.observe)
        name = settings.served_model_names[0] if settings.served_model_names else self._llm.config.model
        metrics = ServerMetrics(self._llm, name, settings.vllm_metrics, steps)
        self._app = create_app(self._llm, settings, metrics)
        self._exporter = MetricExporter(metrics)

    async def handle(self, request: RoutedRequest) -> AsyncGenerator[list[Message]]:
        """Yield the ASGI messages of a response, those that are ready together in one list."""
        queue: asyncio.Queue[Message | None] = asyncio.Queue()  # None: the application has returned
        incoming = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if incoming:
                return incoming.pop()
            await asyncio.Event().wait()  # a client that disconnects cancels this generator
            raise AssertionError

        async def send(message: Message) -> None:
            queue.put_nowait(message)

        task = asyncio.ensure_future(self._app({**request.scope, "state": {}}, receive, send))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            is_open = True
            while is_open:
                messages = [await queue.get()]
                while not queue.empty():
                    messages.append(queue.get_nowait())
                is_open = messages[-1] is not None
                if ready := [message for message in messages if message is not None]:
                    yield ready
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def check_health(self) -> None:
        """Export the metrics; raise if the engine has stopped for good, which replaces this replica.

        An engine that is being restarted by its supervisor is no reason to replace the replica.
        """
        if self._llm.dead:
            raise EngineDeadError(f"the engine has stopped: {self._llm.dead_error}")
        self._exporter.export()

    def __del__(self) -> None:
        """End the engine; Ray calls this after the last open request of a replica that is removed."""
        with contextlib.suppress(AttributeError):  # the engine failed to start
            self._supervisor.stop()
