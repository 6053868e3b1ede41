"""Options `tools` and `tool_choice` of a chat request: checks, messages for templates, grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.serve.api.generation import request_schema as schema
from draftproof.serve.http.errors import ApiError
from draftproof.text.grammar.json_schema_check import not_enforced
from draftproof.text.tool_calls import grammar
from draftproof.text.tool_calls.formats import FORMATS, ToolCallFormat

NO_FORMAT = (
    "this model has no known format of calls; start the server with --tool-call-parser, such as hermes"
)
SYSTEM_PROMPT = """You may call functions to help with the request. Their signatures, as JSON:
<tools>
{tools}
</tools>
For each call write one JSON object with the function's name and arguments between tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """Tools of one request, and the format of its calls."""

    format: ToolCallFormat
    schemas: dict[str, dict[str, Any]]
    only_one: bool  # parallel_tool_calls: false
    structural_tag: dict[str, Any] | None  # the grammar of required, named and strict calls
    syntax: grammar.CallSyntax  # of calls under that grammar

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the parser needs the special tokens in the text."""
        form = self.format
        return form.has_special_tokens or form.syntax.trigger in form.special_tokens

    @property
    def output_format(self) -> ToolCallFormat:
        """Return the format of the output, which a grammar may change."""
        is_other = self.structural_tag is not None and self.syntax.parser
        return FORMATS[self.syntax.parser] if is_other else self.format


def read_tools(body: schema.ChatCompletionRequest, form: ToolCallFormat | None) -> ToolOptions | None:
    """Return the tools of a request; None if it has none or calls are off."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise ApiError(400, "tools: two functions have the same name", "tools")
    is_forced = choice == "required" or isinstance(choice, schema.ToolChoice)
    if is_forced and not tools:
        raise ApiError(400, "tool_choice needs tools", "tool_choice")
    if isinstance(choice, schema.ToolChoice) and choice.function.name not in names:
        text = f"tool_choice: there is no tool {choice.function.name!r}"
        raise ApiError(400, text, "tool_choice.function.name")
    if not tools or choice == "none":
        return None
    if form is None:
        raise ApiError(400, f"tools: {NO_FORMAT}", "tools", "unsupported_option")
    used = [
        t
        for t in tools
        if not isinstance(choice, schema.ToolChoice) or t.function.name == choice.function.name
    ]
    is_strict = any(tool.function.strict for tool in used)
    only_one = body.parallel_tool_calls is False or isinstance(choice, schema.ToolChoice)
    schemas = {tool.function.name: tool.function.parameters or grammar.ANY_OBJECT for tool in tools}
    if body.structured_outputs is not None:
        text = "structured_outputs cannot be combined with tools: it would make calls impossible"
        raise ApiError(400, f'{text}; send tool_choice "none" or leave one of them out', "structured_outputs")
    answer = _answer_schema(body)
    syntax = form.syntax
    if answer is not None and syntax.opening:  # JSON that begins like a call could not be told from one
        syntax = grammar.LISTED
        if answer.get("type") != "object":
            text = f"the schema must have the type object with tools in the format {form.name}"
            raise ApiError(400, f"response_format: {text}", "response_format")
    if not is_forced and not is_strict and answer is None:
        return ToolOptions(form, schemas, only_one, None, syntax)
    enforced = {tool.function.name: _enforced_schema(tool.function) for tool in used}
    made = grammar.CallGrammar(syntax, enforced, only_one, form.special_tokens)
    free = made.optional() if answer is None else made.or_json(answer)
    return ToolOptions(form, schemas, only_one, made.required() if is_forced else free, syntax)


def _answer_schema(body: schema.ChatCompletionRequest) -> dict[str, Any] | None:
    """Return the JSON schema of an answer without calls; None for free text."""
    form = body.response_format
    if form is None or isinstance(form, schema.FreeText):
        return None
    if isinstance(form, schema.AnyJson):
        return grammar.ANY_OBJECT
    if problem := not_enforced(form.json_schema.schema):
        raise ApiError(400, f"response_format: the schema cannot be enforced: {problem}", "response_format")
    return form.json_schema.schema


def _enforced_schema(function: schema.Function) -> dict[str, Any]:
    """Return the schema of the arguments; without strict, any object if it cannot be enforced."""
    parameters = function.parameters or grammar.ANY_OBJECT
    problem = not_enforced(parameters)
    if problem is None:
        return parameters
    if function.strict:
        raise ApiError(400, f"tools: the schema of {function.name} cannot be enforced: {problem}", "tools")
    return grammar.ANY_OBJECT


def template_tools(tools: Sequence[schema.Tool]) -> list[dict[str, Any]]:
    """Return the tools in the form that chat templates expect."""
    found = []
    for tool in tools:
        function = tool.function
        parameters = function.parameters or {"type": "object", "properties": {}}
        described = {
            "name": function.name,
            "description": function.description or "",
            "parameters": parameters,
        }
        found.append({"type": "function", "function": described})
    return found


def tool_messages_as_text(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages with tools, earlier calls and results as text, for templates without tools."""
    messages = [_message_as_text(message) for message in messages]
    if not tools:
        return messages
    text = SYSTEM_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _message_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls, or result of a call, are between the tags of Hermes."""
    calls = message.get("tool_calls")
    if calls is None and message["role"] != "tool":
        return message
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if calls is None:
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    shown = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    parts = [text, *(f"<tool_call>\n{call}\n</tool_call>" for call in shown)]
    return {"role": "assistant", "content": "\n".join(part for part in parts if part)}


def message_fields(message: schema.Message, at: int, as_text: bool) -> dict[str, Any]:
    """Return the fields of a message that concern tools; ApiError if the message is inconsistent."""
    where = f"messages[{at}]"
    calls = list(message.tool_calls or ())
    if message.function_call is not None:
        calls.append(schema.MessageToolCall(function=message.function_call))
    if calls and message.role != "assistant":
        raise ApiError(400, f"{where}: only messages of the assistant have tool_calls", f"{where}.tool_calls")
    if message.content is None and not calls:
        raise ApiError(400, f"{where}.content is missing", f"{where}.content", "missing_option")
    if message.tool_call_id is not None and message.role != "tool":
        text = f"{where}: tool_call_id is for the role tool"
        raise ApiError(400, text, f"{where}.tool_call_id")
    fields: dict[str, Any] = {}
    if calls:
        fields["tool_calls"] = [_template_call(call, as_text) for call in calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _template_call(call: schema.MessageToolCall, as_text: bool) -> dict[str, Any]:
    """Return a call for the template: its arguments as an object, or as text where templates need that.

    Arguments that the model wrote as invalid JSON stay text: agents send them back beside the error.
    """
    text = call.function.arguments or "{}"
    try:
        arguments = text if as_text else json.loads(text)
    except ValueError:
        arguments = text
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function, **({} if call.id is None else {"id": call.id})}
