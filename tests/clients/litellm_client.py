"""Checks of litellm: chat, streams, tools, schemas, embeddings, and Anthropic's messages."""

from __future__ import annotations

from typing import Any, Literal

import litellm
from checks import API_KEY, BASE_URL, MODEL, QUESTION, TOOL, is_weather_call, run_checks, weather
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
OPENAI: Any = {"api_base": BASE_URL, "api_key": API_KEY, "temperature": 0, "num_retries": 0}
HOSTED: Any = {"model": f"hosted_vllm/{MODEL}", **OPENAI}
OPENAI["model"] = f"openai/{MODEL}"


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Paris", "Rome", "Lima"]
    unit: Literal["celsius", "fahrenheit"]


def chat() -> str:
    """Read a whole message."""
    return str(litellm.completion(messages=MESSAGES, max_tokens=24, **OPENAI).choices[0].message.content)


def stream() -> str:
    """Compare a stream with the whole message."""
    chunks = litellm.completion(messages=MESSAGES, max_tokens=24, stream=True, **OPENAI)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat()
    return text


def hosted_vllm() -> str:
    """Use the provider for servers in the manner of vLLM."""
    text = str(litellm.completion(messages=MESSAGES, max_tokens=24, **HOSTED).choices[0].message.content)
    assert text == chat()
    return text


def tools() -> str:
    """Require a call, run it and send its result back."""
    own: Any = {"tools": [TOOL], **OPENAI}
    first = litellm.completion(messages=MESSAGES, tool_choice="required", max_tokens=200, **own)
    call = first.choices[0].message.tool_calls[0]
    assert is_weather_call(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": weather("Paris", "celsius")}
    messages = [*MESSAGES, first.choices[0].message, result]
    answer = litellm.completion(messages=messages, max_tokens=24, **own).choices[0].message.content
    return f"{call.function.arguments} -> {answer}"


def tools_stream() -> str:
    """Read a call from a stream."""
    chunks = litellm.completion(
        messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=200, stream=True, **OPENAI
    )
    whole = litellm.stream_chunk_builder(list(chunks), messages=MESSAGES)
    arguments = whole.choices[0].message.tool_calls[0].function.arguments
    assert is_weather_call(arguments)
    return str(arguments)


def json_schema() -> str:
    """Fill a class by its schema."""
    done = litellm.completion(messages=MESSAGES, response_format=Weather, max_tokens=200, **OPENAI)
    return repr(Weather.model_validate_json(done.choices[0].message.content))


def text_completion() -> str:
    """Complete a prompt."""
    own = {**OPENAI, "model": f"text-completion-openai/{MODEL}"}
    return str(
        litellm.text_completion(prompt="The capital of France is", max_tokens=8, **own).choices[0].text
    )


def responses() -> str:
    """Create a response."""
    done = litellm.responses(input=QUESTION, max_output_tokens=24, **OPENAI)
    text = "".join(part.text for item in done.output if item.type == "message" for part in item.content)
    assert text
    return text


def embeddings() -> int:
    """Embed a text."""
    done = litellm.embedding(model=OPENAI["model"], input=["a cat"], api_base=BASE_URL, api_key=API_KEY)
    return len(done.data[0]["embedding"])


def anthropic() -> str:
    """Use the provider for Anthropic's messages."""
    own: Any = {**OPENAI, "model": f"anthropic/{MODEL}", "api_base": BASE_URL.removesuffix("/v1")}
    return str(litellm.completion(messages=MESSAGES, max_tokens=24, **own).choices[0].message.content)


if __name__ == "__main__":
    checks = [chat, stream, hosted_vllm, tools, tools_stream, json_schema, text_completion]
    run_checks(["litellm", "openai"], [*checks, responses, embeddings, anthropic])
