"""Checks of pydantic-ai: text, streams, tools, and output types in its three modes."""

from __future__ import annotations

from typing import Any, Literal

from checks import API_KEY, BASE_URL, MODEL, QUESTION, run_checks, weather
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=BASE_URL, api_key=API_KEY)


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Paris", "Rome", "Lima"]
    unit: Literal["celsius", "fahrenheit"]


def agent(output_type: Any = str, max_tokens: int = 200, **options: Any) -> Agent[None, Any]:
    """Return an agent that writes one type of output."""
    settings: Any = {"temperature": 0, "max_tokens": max_tokens}
    model = OpenAIChatModel(MODEL, provider=PROVIDER)
    return Agent(model, output_type=output_type, model_settings=settings, retries=1, **options)


async def chat() -> str:
    """Read a whole message."""
    done = await agent(max_tokens=24).run(QUESTION)
    assert done.usage.output_tokens
    return str(done.output)


async def stream() -> str:
    """Compare a stream with the whole message."""
    async with agent(max_tokens=24).run_stream(QUESTION) as done:
        text = "".join([piece async for piece in done.stream_text(delta=True)])
    assert text == await chat()
    return text


async def tool_output() -> str:
    """Fill a class through a call."""
    return repr(await _filled(ToolOutput(Weather)))


async def native_output() -> str:
    """Fill a class by its schema."""
    return repr(await _filled(NativeOutput(Weather)))


async def prompted_output() -> str:
    """Fill a class whose schema is in the prompt; a small model copies that schema unless it has the text."""
    found = (await agent(PromptedOutput(Weather)).run('Write {"city": "Paris", "unit": "celsius"}')).output
    assert isinstance(found, Weather)
    return repr(found)


async def union_output() -> str:
    """Fill one of two types."""
    found = (await agent([Weather, bool]).run(QUESTION)).output
    assert isinstance(found, Weather | bool)
    return repr(found)


async def _filled(output_type: Any) -> Weather:
    """Return the object that an agent writes."""
    found = (await agent(output_type).run(QUESTION)).output
    assert isinstance(found, Weather)
    return found


async def function_tool() -> str:
    """Offer a tool beside text; a small model seldom calls it by itself."""
    return str((await agent(max_tokens=24, tools=[get_weather]).run(QUESTION)).output)


def get_weather(city: Literal["Paris", "Rome", "Lima"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Return the weather of a city."""
    return weather(city, unit)


async def responses() -> str:
    """Fill a class through a call of /v1/responses."""
    model = OpenAIResponsesModel(MODEL, provider=PROVIDER)
    own = Agent(model, output_type=ToolOutput(Weather), model_settings={"temperature": 0, "max_tokens": 200})
    found = (await own.run(QUESTION)).output
    assert isinstance(found, Weather)
    return repr(found)


if __name__ == "__main__":
    checks = [chat, stream, tool_output, native_output, prompted_output, union_output, function_tool]
    run_checks(["pydantic-ai-slim", "openai"], [*checks, responses])
