"""Fuzzing by /openapi.json with schemathesis: no status 500, and every response matches the document."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from draftproof.engine.validation import Limits
from draftproof.sampling_params import PYTHON_OPTIONS, SamplingParams
from draftproof.serve.api.generation.request_schema import (
    UNSUPPORTED,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from draftproof.serve.api.openapi import document
from draftproof.serve.http.errors import ApiError, decode
from draftproof.serve.settings import Settings
from serving import NGRAM, Served, serving, tiny

# without "valid data is accepted": a request may match the schema and still not be served (a prediction
# without the proposer for it)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


@pytest.fixture(scope="module")
def served(folder: Any) -> Any:
    llm = tiny(folder, NGRAM, max_model_len=64)
    llm._grammars.seconds = 1.0  # the fuzzer sends grammars that take as long as the limit
    with serving(llm, Settings(max_n=4)) as running:
        yield running


@pytest.fixture(scope="module")
def api(served: Served) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/score",
        "/tokenize",
        "/detokenize",
        "/v1/models/{model}",
    ],
)
def test_fuzzed_requests_match_the_document(api: Any, path: str, mode: GenerationMode) -> None:
    method = "GET" if "{" in path else "POST"

    @given(api[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=7, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=300)

    check()


@pytest.mark.parametrize("path", ["/v1/models", "/tokenizer_info", "/health", "/version", "/metrics"])
def test_routes_without_a_body_match_the_document(api: Any, path: str) -> None:
    api[path]["GET"].Case().call_and_validate(checks=CHECKS)


def test_control_response_of_the_wrong_type_is_detected(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = api["/detokenize"]["POST"].Case(body={"tokens": [5]}, media_type="application/json")
    case.call_and_validate(checks=CHECKS)
    monkeypatch.setattr(
        "draftproof.serve.api.generation.response_schema.DetokenizeResponse", lambda prompt: {"prompt": 1}
    )
    with pytest.raises(FailureGroup, match="schema"):
        case.call_and_validate(checks=CHECKS)


def test_schema_has_every_sampling_option_and_no_unsupported_one() -> None:
    common = set(GenerationRequest.__struct_fields__)
    completion = set(CompletionRequest.__struct_fields__)
    chat = set(ChatCompletionRequest.__struct_fields__)
    sampling = {each.name for each in fields(SamplingParams)} - PYTHON_OPTIONS
    more = {"return_token_ids", "request_id", "provenance", "stream_granularity", "stream", "stream_options"}
    assert common >= more and completion >= sampling - {"prediction"} and chat >= sampling
    assert {"echo", "prompt"} <= completion and {"chat_template_kwargs", "top_logprobs"} <= chat
    assert not set(UNSUPPORTED) & common - {"tools"}


@pytest.mark.parametrize("name", sorted(name for name, (_, values) in UNSUPPORTED.items() if values))
def test_unsupported_option_is_accepted_only_with_a_value_without_effect(name: str) -> None:
    """Some clients always send such fields."""
    reason, values = UNSUPPORTED[name]
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    kind: Any = ChatCompletionRequest
    if name in ChatCompletionRequest.__struct_fields__:  # unsupported by the other route
        body, kind = {"model": "m", "prompt": "x"}, CompletionRequest
    for value in values:
        for more in ({}, {"n": 2.0}):
            found = decode(msgspec.json.encode({**body, **more, name: value}), kind)
            assert found.n == more.get("n") and found.model == "m"
    with pytest.raises(ApiError) as caught:
        decode(msgspec.json.encode({**body, name: "anything"}), kind)
    assert caught.value.status == 400 and reason in caught.value.message
    with pytest.raises(ApiError, match="nonsense"):
        decode(msgspec.json.encode({**body, name: values[0], "nonsense": 1}), kind)


@pytest.mark.parametrize(
    ("name", "value"), [("parallel_tool_calls", 1), ("store", 0), ("length_penalty", True)]
)
def test_number_in_place_of_a_boolean_is_rejected(name: str, value: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "length_penalty": 1}
    decode(msgspec.json.encode(body), ChatCompletionRequest)
    with pytest.raises(ApiError, match=name):
        decode(msgspec.json.encode({**body, name: value}), ChatCompletionRequest)


def test_document_requires_a_key_where_the_server_does() -> None:
    limits = Limits(320, 64, 20, 64, 0)
    found = document(["m"], limits, False, needs_key=True)
    assert found["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert "security" not in found["paths"]["/health"]["get"]
