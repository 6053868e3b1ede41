"""Requests with known outputs, and invalid requests: what `serve_faults.py` sends.

An output is known from `LLM` in this process, alone and without drafts; it must be returned bit for bit.
"""

from __future__ import annotations

import random
from typing import Any

from common.serving.server_process import Reply, request_bytes

from draftproof import LLM, SamplingParams

STREAMS = 32
Body = dict[str, Any]


def bodies() -> list[Body]:
    """Return requests of every kind with known outputs."""
    kinds: list[Body] = [
        {"temperature": 0, "logprobs": 5},
        {"temperature": 0.8, "logprobs": 2},
        {"temperature": 1.1, "top_k": 40, "frequency_penalty": 0.7, "logprobs": 0},
        {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 3},
        {"temperature": 0.7, "structured_outputs": {"regex": "[a-z ]{5,40}"}, "logprobs": 1},
    ]
    starts = ("The sea was calm and", "one two three one two three one", "To bake bread you need", "In 1969")
    made = []
    for i in range(STREAMS):
        body = {"prompt": f"{starts[i % len(starts)]} {i}", "max_tokens": 20, "seed": 100 + i}
        made.append({**body, **kinds[i % len(kinds)], "return_token_ids": True})
    return made


def expectations(model: str) -> list[tuple[list[int], list[float]]]:
    """Return tokens and logprobs of each request, alone and without drafts."""
    llm = LLM(model)
    found = []
    for body in bodies():
        options = {k: v for k, v in body.items() if k not in ("prompt", "return_token_ids")}
        out = llm.generate([body["prompt"]], SamplingParams(**options))[0].outputs[0]
        rows = out.logprobs or []
        values = [row[i].logprob for i, row in zip(out.token_ids, rows, strict=True)]
        found.append((list(out.token_ids), values))
    llm.close()
    return found


def tokens_of(reply: Reply) -> tuple[list[int], list[float]]:
    """Return tokens and logprobs of a stream or a whole response."""
    ids: list[int] = []
    values: list[float] = []
    if reply.data.startswith(b"data: "):
        parts = [event for event in reply.events() if event != "[DONE]" and "error" not in event]
    else:
        parts = [reply.json()]
    for choice in (choice for part in parts for choice in part["choices"]):
        ids += choice.get("token_ids") or []
        values += (choice["logprobs"] or {}).get("token_logprobs") or []
    return ids, values


# --- invalid requests ------------------------------------------------------------------------------------


def invalid_request(chance: random.Random) -> bytes:
    """Return the bytes of an invalid request."""
    good = request_bytes(bodies()[chance.randrange(STREAMS)])
    kind = chance.randrange(9)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 3000))
    if kind == 1:  # some bytes of a good one are others
        made = bytearray(good)
        for _ in range(chance.randint(1, 20)):
            made[chance.randrange(len(made))] = chance.randrange(256)
        return bytes(made)
    if kind == 2:
        return good[: chance.randrange(len(good))]
    if kind == 3:
        return request_bytes(
            bodies()[0], chance.choice(["/v1/nothing", "/../etc", "/v1/completions/", "/%00"])
        )
    if kind == 4:
        method = chance.choice(["PUT", "DELETE", "GET", "PATCH", "BREW"])
        return request_bytes(bodies()[0], method=method)
    if kind == 5:  # nested deeply, or much of it
        data = b"[" * 100_000 if chance.random() < 0.5 else b'{"prompt": "' + b"a" * 3_000_000 + b'"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    if kind == 6:  # a broken transfer
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return head + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"
    name, value = chance.choice(WRONG)
    path = "/v1/completions" if kind == 7 else "/v1/chat/completions"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    return request_bytes({**(bodies()[0] if kind == 7 else chat), name: value}, path)


WRONG: list[tuple[str, Any]] = [
    ("prompt", None),
    ("messages", [{"role": "nobody"}]),
    ("prompt", [[]]),
    ("prompt", [-1, 10**9]),
    ("temperature", -1),
    ("temperature", "hot"),
    ("max_tokens", -5),
    ("n", 10**9),
    ("logprobs", 10**6),
    ("top_p", 7),
    ("stop", [1, 2]),
    ("stop", [""] * 100),
    ("seed", 1.5),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"999999999": 1}),
    ("structured_outputs", {"regex": "((((("}),
    ("structured_outputs", {"json": {"type": "nonsense"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/a"}}}),
    ("speculative", {"num_speculative_tokens": 10**9}),
    ("chat_template_kwargs", 7),
    ("unknown_option", True),
    ("model", "another"),
    ("stream_options", {"include_usage": 3}),
    ("prompt", "\ud800"),
]
