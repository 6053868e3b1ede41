"""Checks of langchain-openai: chat, streams, bind_tools and every method of with_structured_output."""

from __future__ import annotations

from typing import Any, Literal

from checks import API_KEY, BASE_URL, MODEL, QUESTION, is_weather_call, run_checks, weather
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

JSON_QUESTION = f'{QUESTION} Reply in JSON such as {{"city": "Paris", "unit": "celsius"}}.'


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Paris", "Rome", "Lima"]
    unit: Literal["celsius", "fahrenheit"]


@tool
def get_weather(city: Literal["Paris", "Rome", "Lima"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Return the weather of a city."""
    return weather(city, unit)


def model(max_tokens: int = 200, **options: Any) -> ChatOpenAI:
    """Return the client's chat model."""
    return ChatOpenAI(
        model=MODEL,
        base_url=BASE_URL,
        api_key=API_KEY,
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
        **options,
    )


def chat() -> str:
    """Read a whole message."""
    done = model(24).invoke(QUESTION)
    assert done.content and done.usage_metadata
    return str(done.content)


def stream() -> str:
    """Compare a stream with the whole message."""
    text = "".join(str(chunk.content) for chunk in model(24, stream_usage=True).stream(QUESTION))
    assert text == chat()
    return text


async def batch() -> list[str]:
    """Send three messages at once."""
    return [str(done.content) for done in await model(12).abatch([QUESTION] * 3)]


def bind_tools() -> str:
    """Require a call, run it and send its result back."""
    bound = model().bind_tools([get_weather], tool_choice="any")
    call = bound.invoke(QUESTION)
    assert is_weather_call(call.tool_calls[0]["args"])
    result = get_weather.invoke(call.tool_calls[0])
    assert isinstance(result, ToolMessage)
    answer = model(24).bind_tools([get_weather]).invoke([HumanMessage(QUESTION), call, result])
    return f"{call.tool_calls[0]['args']} -> {answer.content}"


def bind_tools_named() -> dict[str, Any]:
    """Require one function, strictly, in a stream."""
    bound = model().bind_tools([get_weather], tool_choice="get_weather", strict=True)
    total: Any = None
    for chunk in bound.stream(QUESTION):
        total = chunk if total is None else total + chunk
    assert is_weather_call(total.tool_calls[0]["args"])
    return dict(total.tool_calls[0]["args"])


def structured_function_calling() -> str:
    """Fill a pydantic class through a call."""
    return repr(_structured("function_calling", QUESTION))


def structured_json_schema() -> str:
    """Fill a pydantic class by its schema."""
    return repr(_structured("json_schema", QUESTION))


def structured_json_mode() -> str:
    """Read an object; the prompt alone names its keys, which is too much for a small model."""
    found = model().with_structured_output(method="json_mode").invoke(JSON_QUESTION)
    assert isinstance(found, dict)
    return repr(found)


def structured_include_raw() -> str:
    """Fill a dictionary by a JSON schema and keep the message."""
    schema = {"title": "Weather", **Weather.model_json_schema()}
    own = model().with_structured_output(schema, method="json_schema", include_raw=True, strict=True)
    found = own.invoke(QUESTION)
    assert isinstance(found, dict) and is_weather_call(found["parsed"]) and found["parsing_error"] is None
    return repr(found["parsed"])


def _structured(method: Any, question: str) -> Weather:
    """Return the object that one method reads."""
    found = model().with_structured_output(Weather, method=method).invoke(question)
    assert isinstance(found, Weather)
    return found


def responses() -> str:
    """Send the message to /v1/responses."""
    done = model(24, use_responses_api=True).invoke(QUESTION)
    assert done.text
    return str(done.text)


def responses_tools() -> str:
    """Require a call from /v1/responses."""
    bound = model(use_responses_api=True).bind_tools([get_weather], tool_choice="any")
    call = bound.invoke(QUESTION)
    assert is_weather_call(call.tool_calls[0]["args"])
    return repr(call.tool_calls[0]["args"])


def embeddings() -> int:
    """Embed a text."""
    own = OpenAIEmbeddings(model=MODEL, base_url=BASE_URL, api_key=API_KEY, check_embedding_ctx_length=False)
    return len(own.embed_query("a cat"))


if __name__ == "__main__":
    checks = [chat, stream, batch, bind_tools, bind_tools_named, structured_function_calling]
    checks += [structured_json_schema, structured_json_mode, structured_include_raw]
    run_checks(["langchain-openai", "openai"], [*checks, responses, responses_tools, embeddings])
