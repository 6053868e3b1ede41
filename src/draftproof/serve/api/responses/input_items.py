"""Input items of a stored response, as GET /v1/responses/ID/input_items lists them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import QueryParams

from draftproof.serve.api.generation.prompt_parser import content_text
from draftproof.serve.api.generation.request_schema import Message
from draftproof.serve.api.responses import response_schema as schema
from draftproof.serve.api.responses.translate import check_include
from draftproof.serve.http.errors import ApiError

DEFAULT_LIMIT, MAX_LIMIT = 20, 100  # items of one page, as in the OpenAI API


def item_page(id: str, messages: Sequence[Message], query: QueryParams) -> schema.ItemList:
    """Return the page of a response's input items that the query parameters select."""
    for name in query:
        if name not in ("after", "limit", "order", "include", "include[]"):
            raise ApiError(400, f"{name}: unknown parameter; use after, limit, order, include", name)
    check_include([*query.getlist("include"), *query.getlist("include[]")])
    order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order[:100]!r}", "order")
    if limit is not None and not (limit.isdecimal() and 1 <= int(limit[:9]) <= MAX_LIMIT):
        raise ApiError(400, f"limit must lie in 1..{MAX_LIMIT}, got {limit[:100]!r}", "limit")
    items = _items(id.removeprefix("resp_"), messages)
    if order == "desc":
        items.reverse()
    begin = 0
    if after is not None:
        begin = next((i + 1 for i, item in enumerate(items) if item.id == after), 0)
        if begin == 0:
            raise ApiError(400, f"after: the response has no input item {after[:100]!r}", "after")
    end = begin + (DEFAULT_LIMIT if limit is None else int(limit))
    page = items[begin:end]
    return schema.ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=end < len(items),
    )


def _items(suffix: str, messages: Sequence[Message]) -> list[schema.ListedItem]:
    """Return the items of messages, in order; a message of the assistant can be several."""
    items: list[schema.ListedItem] = []

    def new_id(prefix: str) -> str:
        return f"{prefix}_{suffix}_in{len(items)}"

    for message in messages:
        text = content_text(message.content)
        if message.role == "tool":
            call_id = message.tool_call_id or ""
            items.append(schema.CallResult(id=new_id("fco"), call_id=call_id, output=text))
            continue
        if message.reasoning_content:
            part = schema.ReasoningTextPart(text=message.reasoning_content)
            items.append(schema.OutputReasoning(id=new_id("rs"), status="completed", content=[part]))
        if message.role != "assistant":
            content = [schema.InputTextPart(text=text)]
            items.append(schema.InputMessage(id=new_id("msg"), role=message.role, content=content))
        elif text or not message.tool_calls:
            output = [schema.OutputTextPart(text=text)]
            items.append(schema.OutputMessage(id=new_id("msg"), status="completed", content=output))
        for call in message.tool_calls or ():
            items.append(
                schema.OutputCall(
                    id=new_id("fc"),
                    status="completed",
                    call_id=call.id or "",
                    name=call.function.name,
                    arguments=call.function.arguments,
                )
            )
    return items
