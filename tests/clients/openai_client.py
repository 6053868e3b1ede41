"""Checks of the openai package: chat, streams, tools, parse, completions, responses, embeddings."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from checks import API_KEY, BASE_URL, MODEL, QUESTION, TOOL, WEATHER, is_weather_call, run_checks, weather
from openai import AsyncOpenAI, BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
FUNCTION = {"type": "function", "function": {"name": "get_weather"}}
SHORT: Any = {"model": MODEL, "temperature": 0, "max_completion_tokens": 24}
CALL: Any = {"model": MODEL, "temperature": 0, "messages": MESSAGES, "max_completion_tokens": 200}


class Weather(BaseModel):
    """Return the weather."""

    city: Literal["Paris", "Rome", "Lima"]
    unit: Literal["celsius", "fahrenheit"]


def chat() -> str:
    """Read a whole response."""
    done = client.chat.completions.create(messages=MESSAGES, **SHORT)
    assert done.choices[0].finish_reason in ("stop", "length") and done.usage
    assert done.usage.completion_tokens <= 24
    return str(done.choices[0].message.content)


def chat_stream() -> str:
    """Compare a stream with the whole response."""
    options = {"include_usage": True, "include_obfuscation": False}
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=options, **SHORT)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat() and chunks[-1].usage.completion_tokens <= 24
    return text


async def chat_async() -> list[str]:
    """Read four responses at once."""
    async with AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0) as own:
        sent = [own.chat.completions.create(messages=MESSAGES, **SHORT) for _ in range(4)]
        texts = [str(done.choices[0].message.content) for done in await asyncio.gather(*sent)]
    assert len(set(texts)) == 1
    return texts


def chat_logprobs() -> Any:
    """Read logprobs and the alternatives of each token."""
    done = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **SHORT)
    rows = done.choices[0].logprobs and done.choices[0].logprobs.content
    assert rows and all(len(row.top_logprobs) == 3 for row in rows)
    return rows[0].to_dict()


def tools_required() -> str:
    """Require a call, run it and send its result back."""
    done = client.chat.completions.create(tools=[TOOL], tool_choice="required", **CALL)
    message = done.choices[0].message
    assert done.choices[0].finish_reason == "tool_calls" and message.tool_calls
    call: Any = message.tool_calls[0]
    assert is_weather_call(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": weather("Paris", "celsius")}
    messages = [*MESSAGES, message, result]
    answer = client.chat.completions.create(messages=messages, tools=[TOOL], tool_choice="none", **SHORT)
    assert answer.choices[0].message.content
    return f"{call.function.arguments} -> {answer.choices[0].message.content}"


def tools_stream() -> str:
    """Compare streamed calls with whole ones."""
    own: Any = {**CALL, "tools": [TOOL], "tool_choice": FUNCTION}
    with client.chat.completions.stream(**own) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
    calls = stream.get_final_completion().choices[0].message.tool_calls
    whole = client.chat.completions.create(**own).choices[0].message.tool_calls
    assert calls and whole and calls[0].function.arguments == whole[0].function.arguments
    assert len(deltas) > 1 and "".join(event.arguments_delta for event in deltas) == deltas[-1].arguments
    return calls[0].function.arguments


def tools_auto() -> str:
    """Leave the choice to the model."""
    done = client.chat.completions.create(tools=[TOOL], messages=MESSAGES, **SHORT)
    assert done.choices[0].finish_reason in ("stop", "length", "tool_calls")
    return done.choices[0].finish_reason


def parse_content() -> str:
    """Parse the content with a pydantic class."""
    done = client.chat.completions.parse(response_format=Weather, **CALL)
    assert isinstance(done.choices[0].message.parsed, Weather)
    return repr(done.choices[0].message.parsed)


def parse_tool() -> str:
    """Parse the arguments of a strict tool with a pydantic class."""
    tool = pydantic_function_tool(Weather)
    done = client.chat.completions.parse(tools=[tool], tool_choice="required", **CALL)
    calls = done.choices[0].message.tool_calls
    assert calls and isinstance(calls[0].function.parsed_arguments, Weather)
    return repr(calls[0].function.parsed_arguments)


def accepted_fields() -> str:
    """Send the fields that cannot change the output."""
    done = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION, "name": "ada"}],
        metadata={"a": "b"},
        safety_identifier="user-1",
        prompt_cache_key="key-1",
        service_tier="flex",
        store=False,
        user="ada",
        **SHORT,
    )
    return str(done.choices[0].message.content)


def refused_field() -> str:
    """Receive an error for an option that is not supported."""
    try:
        client.chat.completions.create(messages=MESSAGES, web_search_options={}, **SHORT)
    except BadRequestError as error:
        assert error.param == "web_search_options"
        return error.message
    raise AssertionError("no error")


def completions() -> str:
    """Complete a prompt, whole and streamed."""
    own: Any = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**own).choices[0].text
    assert whole == "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **own))
    return whole


def models() -> list[str]:
    """List the models."""
    return [model.id for model in client.models.list()]


def responses() -> str:
    """Create a response and continue it by its id."""
    own: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
    first = client.responses.create(input=QUESTION, instructions="Answer briefly.", **own)
    second = client.responses.create(input="And in Rome?", previous_response_id=first.id, **own)
    assert first.output_text and second.output_text and second.previous_response_id == first.id
    return f"{first.output_text} | {second.output_text}"


def responses_stream() -> str:
    """Compare a stream of events with the whole response."""
    own: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 24, "input": QUESTION}
    with client.responses.stream(**own) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"  # 24 tokens are too few
    assert text == events[-1].response.output_text == client.responses.create(**own).output_text
    return text


def responses_tools() -> str:
    """Call a function, send its output back."""
    tool: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    own: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 200, "tools": [tool]}
    first = client.responses.create(input=QUESTION, tool_choice="required", **own)
    call = next(item for item in first.output if item.type == "function_call")
    assert is_weather_call(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": weather("Paris", "celsius")}
    second = client.responses.create(
        input=[result],
        previous_response_id=first.id,
        tool_choice="none",
        **own,
    )
    assert second.output_text
    return f"{call.arguments} -> {second.output_text}"


def responses_parse() -> str:
    """Parse a response with a pydantic class."""
    done = client.responses.parse(model=MODEL, temperature=0, input=QUESTION, text_format=Weather)
    assert isinstance(done.output_parsed, Weather)
    return repr(done.output_parsed)


def embeddings() -> dict[str, Any]:
    """Embed two texts; the client requests base64 unless floats are named."""
    texts = ["a cat", "a dog"]
    coded = client.embeddings.create(model=MODEL, input=texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [row.embedding for row in coded.data] == [row.embedding for row in plain.data]
    return {"rows": len(coded.data), "size": len(coded.data[0].embedding)}


if __name__ == "__main__":
    checks = [chat, chat_stream, chat_async, chat_logprobs, tools_required, tools_stream, tools_auto]
    checks += [parse_content, parse_tool, accepted_fields, refused_field, completions, models]
    checks += [responses, responses_stream, responses_tools, responses_parse, embeddings]
    run_checks(["openai", "pydantic"], checks)
