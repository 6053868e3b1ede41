"""Checks of llama-index: chat, streams, function calling, structured prediction.

The client reads annotations as objects, so that this file does not postpone them.
"""

from typing import Any, Literal

from checks import API_KEY, BASE_URL, MODEL, QUESTION, is_weather_call, run_checks, weather
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Paris", "Rome", "Lima"]
    unit: Literal["celsius", "fahrenheit"]


def get_weather(city: Literal["Paris", "Rome", "Lima"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Return the weather of a city."""
    return weather(city, unit)


TOOL = FunctionTool.from_defaults(get_weather)


def model(max_tokens: int = 200, **options: Any) -> OpenAILike:
    """Return the client's model."""
    return OpenAILike(
        model=MODEL,
        api_base=BASE_URL,
        api_key=API_KEY,
        context_window=8192,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
        **options,
    )


def chat() -> str:
    """Read a whole message."""
    return str(model(24).chat([ChatMessage(role=MessageRole.USER, content=QUESTION)]).message.content)


def stream() -> str:
    """Compare a stream with the whole message."""
    *_, last = model(24).stream_chat([ChatMessage(role=MessageRole.USER, content=QUESTION)])
    assert last.message.content == chat()
    return str(last.message.content)


def complete() -> str:
    """Complete a prompt."""
    own = model(8)
    own.is_chat_model = False
    return own.complete("The capital of France is").text


def chat_with_tools() -> str:
    """Require a call and read it."""
    own = model()
    done = own.chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    calls = own.get_tool_calls_from_response(done)
    assert calls[0].tool_name == "get_weather" and is_weather_call(calls[0].tool_kwargs)
    return repr(calls[0].tool_kwargs)


def predict_and_call() -> str:
    """Require a call and run it."""
    done = model().predict_and_call([TOOL], user_msg=QUESTION, tool_required=True)
    assert "degrees" in str(done)
    return str(done)


def structured_predict() -> str:
    """Fill a pydantic class through a call."""
    own = model().structured_predict(
        Weather, PromptTemplate("{text}"), {"tool_choice": "required"}, text=QUESTION
    )
    assert isinstance(own, Weather)
    return repr(own)


def structured_schema() -> str:
    """Fill a pydantic class by its schema."""
    own = model(should_use_structured_outputs=True).as_structured_llm(Weather)
    found = own.complete(QUESTION).raw
    assert isinstance(found, Weather)
    return repr(found)


async def function_agent() -> str:
    """Run an agent with a tool; a small model seldom calls it by itself."""
    from llama_index.core.agent.workflow import FunctionAgent

    agent = FunctionAgent(tools=[TOOL], llm=model(24), system_prompt="Use the tool.")
    return str(await agent.run(QUESTION, max_iterations=3))


if __name__ == "__main__":
    checks = [chat, stream, complete, chat_with_tools, predict_and_call, structured_predict]
    run_checks(["llama-index-llms-openai-like", "openai"], [*checks, structured_schema, function_agent])
