"""The default model behind `draftproof serve`: real text and drafts, equal bits without speculation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from server_process import Program, command_line, started

COPY = "Repeat exactly: the river begins high in the mountains, where the snow melts in spring."


@pytest.fixture(scope="module")
def served(smollm2_path: object) -> Any:
    spec = '{"method": "ngram", "num_speculative_tokens": 5, "adaptive": false}'
    options = "--device", "cpu", "--max-model-len", "512", "--max-num-seqs", "4"
    with started(command_line("smollm2-135m", *options, "--speculative-config", spec)) as running:
        yield running


def test_chat_is_the_same_with_and_without_speculation(served: Program) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        def chat(speculative: bool, stream: bool = False, max_tokens: int = 40) -> Any:
            return client.chat.completions.create(
                model="smollm2-135m",
                messages=[{"role": "user", "content": COPY}],
                max_completion_tokens=max_tokens,
                temperature=0.3,
                seed=11,
                logprobs=True,
                top_logprobs=5,
                stream=stream,
                extra_body={"speculative": speculative},
            )

        drafted, plain = chat(True), chat(False)
        assert drafted.choices[0].message.content == plain.choices[0].message.content
        assert drafted.choices[0].logprobs == plain.choices[0].logprobs
        counted = drafted.metrics["speculative_decoding"]
        assert counted["num_accepted_draft_tokens"] > 0 and counted["mean_acceptance_length"] > 1
        assert plain.metrics["speculative_decoding"]["num_draft_tokens"] == 0
        streamed = [chunk.choices[0] for chunk in chat(True, stream=True)]
        assert "".join(part.delta.content for part in streamed) == plain.choices[0].message.content
        logprobs = [entry for part in streamed if part.logprobs for entry in part.logprobs.content]
        assert logprobs == plain.choices[0].logprobs.content
        again = chat(True, max_tokens=1)
        assert drafted.usage.prompt_tokens > 20 and again.usage.prompt_tokens_details.cached_tokens > 0


def test_json_schema_output_is_the_same_with_and_without_speculation(served: Program) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "The capital of France, as JSON."}],
        "max_completion_tokens": 60,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        "logprobs": True,
        "top_logprobs": 3,
    }
    replies = [
        served.http.post("/v1/chat/completions", json={**body, "speculative": on}).json()
        for on in (True, False)
    ]
    first, second = (reply["choices"][0] for reply in replies)
    assert first["logprobs"] == second["logprobs"] and first["message"] == second["message"]
    assert set(json.loads(first["message"]["content"])) == {"city", "big"}
    wrong = {**body, "response_format": {"type": "json_schema", "json_schema": {"schema": {"if": {}}}}}
    error = served.http.post("/v1/chat/completions", json=wrong).json()["error"]
    assert error["param"] == "response_format" and "'if' is not supported" in error["message"]
