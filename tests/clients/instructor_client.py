"""Checks of instructor in its TOOLS, JSON and schema modes, with streams of partial objects."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from checks import API_KEY, BASE_URL, MODEL, QUESTION, run_checks
from openai import OpenAI
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
# a small model copies the schema of the prompt where no grammar has it
COPY: Any = [{"role": "user", "content": 'Write {"city": "Paris", "unit": "celsius"}'}]


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Paris", "Rome", "Lima"]
    unit: Literal["celsius", "fahrenheit"]


def _created(mode: instructor.Mode, messages: Any = MESSAGES) -> Weather:
    """Return the object of one mode."""
    own = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0), mode=mode)
    found = own.chat.completions.create(
        model=MODEL, response_model=Weather, messages=messages, temperature=0, max_tokens=200, max_retries=0
    )
    assert isinstance(found, Weather)
    return found


def tools() -> str:
    """Fill a class through a call."""
    return repr(_created(instructor.Mode.TOOLS))


def tools_strict() -> str:
    """Fill a class through a strict call."""
    return repr(_created(instructor.Mode.TOOLS_STRICT))


def json() -> str:
    """Fill a class in JSON mode: the prompt describes the schema."""
    return repr(_created(instructor.Mode.JSON, COPY))


def json_schema() -> str:
    """Fill a class by its schema."""
    return repr(_created(instructor.Mode.JSON_SCHEMA))


def partial() -> str:
    """Read the partial objects of a stream."""
    own = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY), mode=instructor.Mode.TOOLS)
    *_, last = own.chat.completions.create_partial(
        model=MODEL, response_model=Weather, messages=MESSAGES, temperature=0, max_tokens=200
    )
    assert last.city and last.unit
    return repr(last)


if __name__ == "__main__":
    run_checks(["instructor", "openai"], [tools, tools_strict, json, json_schema, partial])
