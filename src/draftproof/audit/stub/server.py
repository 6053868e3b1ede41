"""OpenAI's completions and chat API over the stub model, as a transport of httpx."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Mapping
from typing import Any

import httpx

from draftproof.audit.stub.generate import HONEST, Fault, Output, generate
from draftproof.audit.stub.model import END_ID, Row, StubModel

WIDTH_HOLD_SECONDS = 0.004  # until requests that arrive together are counted
REFUSED = ("response_format", "prompt_logprobs", "repetition_penalty")


class StubServer:
    """Server without a socket: `transport()` connects a client to it."""

    def __init__(
        self,
        model: StubModel,
        fault: Fault = HONEST,
        *,
        is_chat_only: bool = False,
        max_top: int = 20,
        reports_end: bool = True,
        has_seed: bool = True,
        is_exact: bool = True,
        reports_processed: bool = False,
        decimals: int = 12,
        entropy: int = 0,
    ) -> None:
        self.model, self.fault = model, fault
        self._is_chat_only, self._max_top = is_chat_only, max_top
        self._reports_end, self._has_seed = reports_end, has_seed
        self._is_exact, self._reports_processed = is_exact, reports_processed
        self._decimals = decimals
        self._random = random.Random(entropy)
        self._entropy = entropy
        self._open = 0
        self._lists: dict[tuple[int, int], tuple[Row, list[tuple[str, float, int]]]] = {}
        self._lock = threading.Lock()

    def transport(self) -> httpx.MockTransport:
        """Return a transport that answers requests in this process."""
        return httpx.MockTransport(self.handle)

    def handle(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "stub"}]})
        is_chat = request.url.path.endswith("/chat/completions")
        if self._is_chat_only and not is_chat:
            return httpx.Response(404, json={"error": {"message": "no such route"}})
        body = json.loads(request.content)
        refused = [name for name in REFUSED if name in body]
        if not self._has_seed and "seed" in body:
            refused.append("seed")
        top = body.get("top_logprobs" if is_chat else "logprobs") or 0
        if refused or top > self._max_top:
            return httpx.Response(400, json={"error": {"message": f"refused: {refused or 'logprobs'}"}})
        return self._complete(body, is_chat, int(top))

    def _complete(self, body: Mapping[str, Any], is_chat: bool, top: int) -> httpx.Response:
        """Generate the answer to one request."""
        with self._lock:
            self._open += 1
            # the entropy is part of the seed, so that simulated audits differ
            seed = int(body.get("seed", self._random.getrandbits(40))) ^ (self._entropy << 40)
        if self.fault.depends_on_width:
            time.sleep(WIDTH_HOLD_SECONDS)
        width = self._open
        text = body["messages"][-1]["content"] if is_chat else body["prompt"]
        prompt = self.model.encode(text)
        is_scored = bool(body.get("echo")) and not body.get("max_tokens")
        rows = self._rows(width)
        made = (
            Output()
            if is_scored
            else generate(self.model, rows, prompt, body, seed, self.fault, self._reports_processed)
        )
        with self._lock:
            self._open -= 1
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(made.tokens)}
        if body.get("echo") and not is_chat:
            indices = [self.model.row_index(prompt[:i] or [0]) for i in range(len(prompt))]
            scored = [(t, rows[i], 0) for t, i in zip(prompt, indices, strict=True)]
            made = Output(scored + made.tokens, made.finish_reason, text + made.text)
        if not body.get("stream"):
            choice = self._choice(made.text, made.tokens, is_chat, top, made.finish_reason, "message")
            return httpx.Response(200, json={"choices": [choice], "usage": usage})
        return httpx.Response(200, text=self._stream(made, is_chat, top, usage))

    def _rows(self, width: int) -> list[Row]:
        """Return the distributions of a request while `width` requests are in flight."""
        if self.fault.depends_on_width and width > 1:
            return self.model.wide_rows
        if not self._is_exact:
            return self._random.choice(self.model.inexact_rows)
        return self.model.rows

    def _stream(self, made: Output, is_chat: bool, top: int, usage: Mapping[str, int]) -> str:
        """Return the events of a stream, one for each step."""
        events: list[dict[str, Any]] = []
        group: list[tuple[int, Row | None, int]] = []
        rest = made.text
        for number, token in enumerate(made.tokens):
            group.append(token)
            following = made.tokens[number + 1] if number + 1 < len(made.tokens) else None
            if following is None or following[2] == 0:
                words = "".join(self.model.pieces[t] for t, _, _ in group if t != END_ID)
                piece = rest[: len(words)] if following is not None else rest
                rest = rest[len(piece) :]
                reason = made.finish_reason if following is None else None
                choice = self._choice(piece, group, is_chat, top, reason, "delta")
                events.append({"choices": [choice]})
                group = []
        events.append({"choices": [], "usage": usage})
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def _choice(
        self,
        text: str,
        tokens: list[tuple[int, Row | None, int]],
        is_chat: bool,
        top: int,
        reason: str | None,
        key: str,
    ) -> dict[str, Any]:
        """Return the choice of a body or an event."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {key: {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if not top:
            return choice
        shown = [item for item in tokens if self._reports_end or item[0] != END_ID]
        names = [self.model.words[token] for token, _, _ in shown]
        values = [
            0.0 if row is None else round(row.logprobs[token], self._decimals) for token, row, _ in shown
        ]
        lists = [[] if row is None else self._entries(row, top) for _, row, _ in shown]
        if is_chat:
            choice["logprobs"] = {
                "content": [
                    {
                        "token": name,
                        "id": token,
                        "logprob": value,
                        "top_logprobs": [{"token": w, "logprob": v, "id": i} for w, v, i in entries],
                    }
                    for name, (token, _, _), value, entries in zip(names, shown, values, lists, strict=True)
                ]
            }
            return choice
        tops = [{word: value for word, value, _ in entries} for entries in lists]
        choice["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
        choice["token_ids"] = [token for token, _, _ in shown]
        return choice

    def _entries(self, row: Row, top: int) -> list[tuple[str, float, int]]:
        """Return text, logprob and id of the most likely tokens of a row."""
        key = (id(row), top)
        if key not in self._lists:
            finite = [i for i in row.order[:top] if row.logprobs[i] > -math.inf]
            words, digits = self.model.words, self._decimals
            # the row is kept, so that no other row gets its identity
            self._lists[key] = row, [(words[i], round(row.logprobs[i], digits), i) for i in finite]
        return self._lists[key][1]
