"""Translation of a body of /v1/messages to a chat request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from draftproof.serve.api.generation import request_schema as chat
from draftproof.serve.api.generation.prompt_parser import THINKING_SWITCHES, PromptParser
from draftproof.serve.api.messages import request_schema as schema
from draftproof.serve.http.errors import ApiError

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ERROR_MARK = "Error: "  # before the result of a call that failed; chat messages have no field for it


def chat_request(body: schema.CountTokensRequest, prompts: PromptParser) -> chat.ChatCompletionRequest:
    """Return the chat request of a body for the model of `prompts`."""
    messages = chat_messages(body)
    choice, parallel = _tool_choice(body.tool_choice)
    is_prefilled = messages[-1].role == "assistant"
    if is_prefilled and messages[-1].tool_calls:
        raise ApiError(400, "messages: the results of the last tool_use blocks are missing", "messages")
    fields: dict[str, Any] = {name: getattr(body, name) for name in chat.SamplingRequest.__struct_fields__}
    if isinstance(body, schema.MessagesRequest):
        fields["max_completion_tokens"] = body.max_tokens
        fields["stop"] = body.stop_sequences
        if body.metadata is not None and body.metadata.user_id is not None:
            fields["user"] = body.metadata.user_id[:256]
    return chat.ChatCompletionRequest(
        **{**fields, **_reasoning(body, prompts)},
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_response_format(body.output_config),
        continue_final_message=is_prefilled or None,
    )


def chat_messages(body: schema.CountTokensRequest) -> list[chat.Message]:
    """Return the messages of a body; neighbours with the same role become one message."""
    messages: list[chat.Message] = []
    if body.system:
        messages.append(chat.Message(role="system", content=_joined(body.system)))
    turns: list[tuple[Any, list[schema.Block]]] = []
    for message in body.messages:
        blocks = message.content
        blocks = [schema.TextBlock(text=blocks)] if isinstance(blocks, str) else blocks
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, list(blocks)))
    for role, blocks in turns:
        messages += _assistant(blocks) if role == "assistant" else _user(role, blocks)
    if not messages:
        raise ApiError(400, "messages: they have no content", "messages")
    return messages


def _joined(content: str | Sequence[schema.TextBlock]) -> str | list[chat.TextPart]:
    if isinstance(content, str):
        return content
    parts = [chat.TextPart(text=block.text) for block in content]
    return parts[0].text if len(parts) == 1 else parts or ""


def _assistant(blocks: Sequence[schema.Block]) -> list[chat.Message]:
    """Return the message of a turn of the assistant."""
    texts = [block for block in blocks if isinstance(block, schema.TextBlock)]
    calls = []
    for block in blocks:
        if isinstance(block, schema.ToolResultBlock):
            raise ApiError(400, "messages: tool_result blocks belong to the user", "messages")
        if isinstance(block, schema.ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = chat.CalledFunction(name=block.name, arguments=arguments)
            calls.append(chat.MessageToolCall(id=block.id, function=function))
    content = _joined(texts) if texts or not calls else None
    thinking = "".join(block.thinking for block in blocks if isinstance(block, schema.ThinkingBlock))
    return [
        chat.Message(
            role="assistant",
            content=content,
            tool_calls=calls or None,
            reasoning_content=thinking or None,
        )
    ]


def _user(role: Any, blocks: Sequence[schema.Block]) -> list[chat.Message]:
    """Return the messages of a turn of the user: one for each tool result, one for each run of texts."""
    messages: list[chat.Message] = []
    texts: list[schema.TextBlock] = []
    for block in blocks:
        if isinstance(block, schema.TextBlock):
            texts.append(block)
        elif isinstance(block, schema.ToolResultBlock) and role == "user":
            if texts:
                messages.append(chat.Message(role=role, content=_joined(texts)))
                texts = []
            messages.append(_result(block))
        else:
            raise ApiError(400, f"messages: a block of this type is not for the role {role}", "messages")
    if texts or not messages:
        messages.append(chat.Message(role=role, content=_joined(texts)))
    return messages


def _result(block: schema.ToolResultBlock) -> chat.Message:
    content = _joined(block.content or "")
    if block.is_error:
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        content = ERROR_MARK + text
    return chat.Message(role="tool", content=content, tool_call_id=block.tool_use_id)


def _tool(tool: schema.CustomTool) -> chat.Tool:
    return chat.Tool(
        type="function",
        function=chat.Function(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        ),
    )


def _tool_choice(choice: schema.MessageToolChoice | None) -> tuple[Any, bool | None]:
    """Return tool_choice and parallel_tool_calls of the chat request."""
    if choice is None:
        return None, None
    parallel = False if choice.disable_parallel_tool_use else None
    if choice.type != "tool":
        return CHOICES[choice.type], parallel
    if choice.name is None:
        raise ApiError(400, "tool_choice.name is missing", "tool_choice.name", "missing_option")
    return chat.ToolChoice(type="function", function=chat.ChosenFunction(name=choice.name)), parallel


def _response_format(config: schema.OutputConfig | None) -> Any:
    if config is None or config.format is None:
        return None
    return chat.SchemaJson(json_schema=chat.JsonSchema(schema=config.format.schema))


def _reasoning(body: schema.CountTokensRequest, prompts: PromptParser) -> dict[str, Any]:
    """Return the options of the reasoning."""
    thinking, effort = body.thinking, None if body.output_config is None else body.output_config.effort
    names = dict(body.chat_template_kwargs or {})
    fields: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    switches = [name for name in THINKING_SWITCHES if name in prompts.template_names]
    if thinking is not None and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            name = "thinking.budget_tokens"
            raise ApiError(400, f"{name} is missing", name, "missing_option")
        fields["thinking_token_budget"] = thinking.budget_tokens
        names = dict.fromkeys(switches, True) | names
    elif thinking is not None and thinking.type == "disabled":
        names = dict.fromkeys(switches, False) | names
        if not switches and prompts.reasoning is not None:
            fields["thinking_token_budget"] = 0
    if thinking is not None and thinking.display == "omitted":
        fields["include_reasoning"] = False
    return {**fields, "chat_template_kwargs": names or None}
