"""Routes of the Messages API: create a message, count the tokens of one."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive, Scope, Send

from draftproof.serve.api.generation.handler import CompletionHandler
from draftproof.serve.api.generation.prompt_parser import PromptParser
from draftproof.serve.api.generation.request_schema import ChatCompletionRequest
from draftproof.serve.api.generation.route_forms import EventEncoder, GenerationRoute, renamed
from draftproof.serve.api.messages import response_schema as schema
from draftproof.serve.api.messages.builder import MessageBuilder, MessageEncoder
from draftproof.serve.api.messages.request_schema import CountTokensRequest, MessagesRequest
from draftproof.serve.api.messages.translate import chat_request
from draftproof.serve.http.errors import MESSAGES_PATH, ApiError, in_form_of
from draftproof.serve.http.io import read_json, send_json
from draftproof.serve.http.request_guard import RequestGuard
from draftproof.serve.http.request_log import RequestRecord
from draftproof.serve.settings import Settings

# names of the chat request's options in the body of this route
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


class MessagesRoute(GenerationRoute):
    """POST /v1/messages."""

    schema = MessagesRequest
    id_prefix = "msg_"

    def __init__(self, prompts: PromptParser) -> None:
        self._prompts = prompts

    def request(self, body: Any, record: RequestRecord) -> ChatCompletionRequest:
        """Return the chat request of a body."""
        return chat_request(body, self._prompts)

    def builder(self, body: Any, record: RequestRecord, *args: Any) -> MessageBuilder:
        """Return the builder of the message."""
        return MessageBuilder(*args)

    def encoder(self, builder: Any) -> EventEncoder:
        """Return the encoder of a stream."""
        return MessageEncoder(builder)

    def error(self, error: ApiError) -> ApiError:
        """Return an error in Anthropic's form."""
        return in_form_of(MESSAGES_PATH, renamed(error, _NAMES, MessagesRequest.unsupported))


class TokenCounter:
    """Handler of POST /v1/messages/count_tokens."""

    def __init__(self, settings: Settings, guard: RequestGuard, completions: CompletionHandler) -> None:
        self._settings, self._guard, self._completions = settings, guard, completions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return the number of tokens of the conversation, as /v1/messages would render it."""
        with self._guard.admit(scope["state"]["record"]):
            body = await read_json(scope, receive, self._settings, CountTokensRequest)
            self._completions.check_model(body.model)
            prompts = self._completions.prompts
            ids = await prompts.conversation(chat_request(body, prompts))
        await send_json(send, schema.TokenCount(input_tokens=len(ids)))
