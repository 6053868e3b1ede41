"""What /openapi.json says is what happens: a fuzzer that nobody here wrote finds no 500 and no lie."""

from __future__ import annotations

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
from draftproof.serve.api.openapi import document
from draftproof.serve.api.request_schema import (
    NO_EFFECT_VALUES,
    UNSUPPORTED,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from draftproof.serve.http.errors import ApiError, decode
from draftproof.serve.settings import Settings
from serving import NGRAM, Served, make_folder, serving, tiny

# a request may fit the schema and still not be served (a prediction without the proposer for it), so that
# "valid data is accepted" is the one promise left out
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    llm = tiny(make_folder(tmp_path_factory.mktemp("fuzzed")), NGRAM, max_model_len=64)
    llm._grammars.seconds = 1.0  # some that it thinks of take as long as they may
    with serving(llm, Settings(max_n=4)) as running:
        yield running


@pytest.fixture(scope="module")
def api(served: Served) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models/{model}"]
)
def test_fuzzed(api: Any, path: str, mode: GenerationMode) -> None:
    method = "GET" if "{" in path else "POST"

    @given(api[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=60)

    ask()


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/metrics"])
def test_plain_routes(api: Any, path: str) -> None:
    api[path]["GET"].Case().call_and_validate(checks=CHECKS)


def test_control_a_reply_that_is_not_as_described(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a field of the wrong type is seen."""
    case = api["/detokenize"]["POST"].Case(body={"tokens": [5]}, media_type="application/json")
    case.call_and_validate(checks=CHECKS)
    monkeypatch.setattr("draftproof.serve.api.response_schema.DetokenizeResponse", lambda prompt: {"prompt": 1})
    with pytest.raises(FailureGroup, match="schema"):
        case.call_and_validate(checks=CHECKS)


def test_every_option_of_the_issue_is_there() -> None:
    """And what is refused by name is nobody's option."""
    common = set(GenerationRequest.__struct_fields__)
    assert common >= {
        *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
        *("skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs", "logprob_token_ids"),
        *("return_token_ids", "allowed_token_ids", "bad_words", "structured_outputs", "priority"),
        *("cache_salt", "request_id", "speculative", "logprobs_mode", "include_draft_logprobs"),
        *("provenance", "stream_granularity", "stop", "seed", "logit_bias", "stream", "stream_options", "n"),
    }
    assert {"echo", "logprobs", "max_tokens", "prompt"} <= set(CompletionRequest.__struct_fields__)
    assert {"chat_template_kwargs", "prediction", "top_logprobs", "max_completion_tokens"} <= set(
        ChatCompletionRequest.__struct_fields__
    )
    assert not set(UNSUPPORTED) & common - {"tools"}


@pytest.mark.parametrize("name", sorted(NO_EFFECT_VALUES))
def test_what_asks_for_nothing_is_let_pass_and_the_rest_is_told_why_not(name: str) -> None:
    """Some clients always send such fields."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for value in NO_EFFECT_VALUES[name]:
        for more in ({}, {"n": 2.0}):
            asked = decode(msgspec.json.encode({**body, **more, name: value}), ChatCompletionRequest)
            assert asked.n == more.get("n") and asked.model == "m"
    with pytest.raises(ApiError) as told:
        decode(msgspec.json.encode({**body, name: "anything"}), ChatCompletionRequest)
    assert told.value.status == 400 and UNSUPPORTED[name] in told.value.message
    with pytest.raises(ApiError, match="nonsense"):
        decode(
            msgspec.json.encode({**body, name: NO_EFFECT_VALUES[name][0], "nonsense": 1}),
            ChatCompletionRequest,
        )


@pytest.mark.parametrize(
    ("name", "value"), [("parallel_tool_calls", 1), ("store", 0), ("length_penalty", True)]
)
def test_numbers_and_truths_are_not_the_same(name: str, value: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "length_penalty": 1}
    decode(msgspec.json.encode(body), ChatCompletionRequest)
    with pytest.raises(ApiError, match=name):
        decode(msgspec.json.encode({**body, name: value}), ChatCompletionRequest)


def test_keys_are_in_the_document() -> None:
    limits = Limits(320, 64, 20, 64, 0, False)
    told = document(["m"], limits, False, needs_key=True)
    assert told["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert "security" not in told["paths"]["/health"]["get"]
