"""Checks of the anthropic package against /v1/messages: text, streams, tools, token counts."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic, BadRequestError, beta_tool
from checks import API_KEY, MODEL, QUESTION, URL, WEATHER, is_weather_call, run_checks, weather

client = Anthropic(base_url=URL, api_key=API_KEY, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
SHORT: Any = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}
TOOL: Any = {"name": "get_weather", "description": "Return the weather.", "input_schema": WEATHER}
CALL: Any = {**SHORT, "max_tokens": 200, "messages": MESSAGES, "tools": [TOOL]}


def message() -> str:
    """Read a whole message."""
    done = client.messages.create(messages=MESSAGES, system="Answer briefly.", **SHORT)
    assert done.stop_reason in ("end_turn", "max_tokens") and 0 < done.usage.output_tokens <= 24
    assert done.content[0].type == "text"
    return done.content[0].text


def stream() -> str:
    """Compare a stream with the whole message."""
    with client.messages.stream(messages=MESSAGES, system="Answer briefly.", **SHORT) as events:
        text = "".join(events.text_stream)
        assert events.get_final_text() == text
    assert text == message()
    return text


def system_blocks() -> str:
    """Send blocks with the cache marks that coding clients add."""
    mark = {"type": "ephemeral"}
    system: Any = [{"type": "text", "text": "Answer briefly.", "cache_control": mark}]
    content: Any = [{"type": "text", "text": QUESTION, "cache_control": mark}]
    done = client.messages.create(messages=[{"role": "user", "content": content}], system=system, **SHORT)
    assert done.content[0].type == "text"
    return done.content[0].text


def tools() -> str:
    """Require a call, run it and send its result back."""
    first = client.messages.create(tool_choice={"type": "any"}, **CALL)
    call = next(block for block in first.content if block.type == "tool_use")
    assert first.stop_reason == "tool_use" and is_weather_call(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather("Paris", "celsius")}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(messages=messages, tools=[TOOL], **SHORT)
    return f"{call.input} -> {answer.content}"


def tools_stream() -> dict[str, Any]:
    """Compare a streamed call with a whole one."""
    own: Any = {**CALL, "tool_choice": {"type": "tool", "name": "get_weather"}}
    with client.messages.stream(**own) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        last = events.get_final_message()
    call = next(block for block in last.content if block.type == "tool_use")
    whole = client.messages.create(**own).content
    assert is_weather_call(call.input) and len(pieces) > 1
    assert call.input == next(block.input for block in whole if block.type == "tool_use")
    return dict(call.input)


@beta_tool
def get_weather(city: str, unit: str) -> str:
    """Return the weather of a city.

    Args:
        city: a city.
        unit: celsius or fahrenheit.
    """
    return weather(city, unit)


def tool_runner() -> str:
    """Run the client's loop of calls; a small model seldom calls the tool by itself."""
    runner = client.beta.messages.tool_runner(
        messages=MESSAGES, tools=[get_weather], max_iterations=2, **SHORT
    )
    return repr([message.stop_reason for message in runner])


def count_tokens() -> int:
    """Count the tokens of a conversation."""
    return client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens


def refused_field() -> str:
    """Receive an error for an option that is not supported."""
    content: Any = [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}]
    try:
        client.messages.create(messages=[{"role": "user", "content": content}], **SHORT)
    except BadRequestError as error:
        return error.message
    raise AssertionError("no error")


if __name__ == "__main__":
    checks = [message, stream, system_blocks, tools, tools_stream, tool_runner, count_tokens, refused_field]
    run_checks(["anthropic"], checks)
