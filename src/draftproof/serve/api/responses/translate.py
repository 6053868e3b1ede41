"""Translation of a body of /v1/responses to a chat request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from draftproof.serve.api.generation import request_schema as chat
from draftproof.serve.api.responses import request_schema as schema
from draftproof.serve.http.errors import ApiError

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = {
    LOGPROBS,
    "reasoning.encrypted_content",  # reasoning items have their text instead
    # of tools and parts that no output has
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}
_SAME_NAMES = (
    *chat.SamplingRequest.__struct_fields__,
    *("parallel_tool_calls", "stop", "chat_template_kwargs", "user", "safety_identifier"),
    *("prompt_cache_key", "metadata"),
)


def chat_request(body: schema.ResponseRequest, earlier: Iterable[chat.Message]) -> chat.ChatCompletionRequest:
    """Return the chat request of a body. `earlier`: messages of the previous responses."""
    needs_logprobs = LOGPROBS in (body.include or ()) or body.top_logprobs is not None
    check_include(body.include or ())
    messages = [*_instructions(body), *earlier, *input_messages(body.input)]
    tools, choice = _tools(body)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAMES}
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    return chat.ChatCompletionRequest(
        **fields,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        tools=tools,
        tool_choice=choice,
        response_format=_response_format(body.text),
        logprobs=needs_logprobs or None,
        top_logprobs=body.top_logprobs,
        service_tier=None if body.service_tier is None else "default",
    )


def check_include(names: Iterable[str]) -> None:
    """Reject an unknown name of `include`."""
    for i, name in enumerate(names):
        if name not in INCLUDABLE:
            text = f"include: unknown value {name[:100]!r}; the values are {', '.join(sorted(INCLUDABLE))}"
            raise ApiError(400, text, f"include[{i}]")


def _instructions(body: schema.ResponseRequest) -> list[chat.Message]:
    if body.instructions is None:
        return []
    return [chat.Message(role="system", content=body.instructions)]


def input_messages(given: str | list[schema.InputItem]) -> list[chat.Message]:
    """Return the messages of the input; calls are part of the assistant's message before them."""
    if isinstance(given, str):
        return [chat.Message(role="user", content=given)]
    messages: list[chat.Message] = []
    reasoning = ""  # before the next message of the assistant
    for at, item in enumerate(given):
        where = f"input[{at}]"
        if item.type == "reasoning":
            reasoning += _reasoning(item)
            continue
        if item.type == "message":
            messages.append(_message(item, where))
        elif item.type == "function_call":
            _add_call(messages, item, where)
        else:
            messages.append(_result(item, where))
        if reasoning and messages[-1].role == "assistant":
            messages[-1].reasoning_content, reasoning = reasoning, ""
    if not messages:
        raise ApiError(400, "input: there is no message", "input")
    return messages


def _reasoning(item: schema.InputItem) -> str:
    """Return the text of a reasoning item, or the summary in place of a text that is missing."""
    content = item.content or item.summary or ""
    return content if isinstance(content, str) else "".join(part_text(part) for part in content)


def _needed(item: schema.InputItem, name: str, where: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise ApiError(400, f"{where}.{name} is missing", f"{where}.{name}", "missing_option")
    return value


def _message(item: schema.InputItem, where: str) -> chat.Message:
    role = _needed(item, "role", where)
    return chat.Message(role=role, content=_content(_needed(item, "content", where)))


def _add_call(messages: list[chat.Message], item: schema.InputItem, where: str) -> None:
    function = chat.CalledFunction(
        name=_needed(item, "name", where), arguments=_needed(item, "arguments", where)
    )
    call = chat.MessageToolCall(id=_needed(item, "call_id", where), function=function)
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        last = chat.Message(role="assistant")
        messages.append(last)
    last.tool_calls = [*(last.tool_calls or ()), call]


def _result(item: schema.InputItem, where: str) -> chat.Message:
    content = _content(_needed(item, "output", where))
    return chat.Message(role="tool", content=content, tool_call_id=_needed(item, "call_id", where))


def _content(content: str | list[schema.Part]) -> str | list[chat.TextPart]:
    if isinstance(content, str):
        return content
    parts = [chat.TextPart(text=part_text(part)) for part in content]
    return parts[0].text if len(parts) == 1 else parts or ""


def part_text(part: schema.Part | schema.SummaryText) -> str:
    """Return the text of a part."""
    return part.refusal if isinstance(part, schema.Refusal) else part.text


def _tools(body: schema.ResponseRequest) -> tuple[list[chat.Tool] | None, Any]:
    """Return tools and tool choice of the chat request."""
    tools = body.tools or []
    choice: Any = body.tool_choice
    if isinstance(choice, schema.ResponseToolChoice):
        if choice.type == "function":
            if choice.name is None:
                raise ApiError(400, "tool_choice.name is missing", "tool_choice.name", "missing_option")
            function = chat.ChosenFunction(name=choice.name)
            choice = chat.ToolChoice(type="function", function=function)
        else:
            names = {tool.name for tool in choice.tools or ()}
            if unknown := names - {tool.name for tool in tools}:
                text = f"tool_choice.tools: there is no tool {min(unknown)!r}"
                raise ApiError(400, text, "tool_choice.tools")
            tools = [tool for tool in tools if tool.name in names]
            choice = choice.mode or "auto"
    made = [
        chat.Tool(
            type="function",
            function=chat.Function(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            ),
        )
        for tool in tools
    ]
    return made or None, choice


def _response_format(text: schema.TextOptions | None) -> Any:
    form = None if text is None else text.format
    if form is None:
        return None
    if form.type == "text":
        return chat.FreeText()
    if form.type == "json_object":
        return chat.AnyJson()
    if form.schema is None:
        raise ApiError(400, "text.format.schema is missing", "text.format.schema", "missing_option")
    given = chat.JsonSchema(schema=form.schema, name=form.name, description=form.description)
    return chat.SchemaJson(json_schema=given)
