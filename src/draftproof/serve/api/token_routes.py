"""Routes of the tokenizer: /tokenize, /detokenize, /tokenizer_info.

They have the limits of generation requests on prompts, open requests and keys, and threads of their own, so
that long texts delay no generation.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from draftproof.serve.api.generation import response_schema as schema
from draftproof.serve.api.generation.handler import CompletionHandler
from draftproof.serve.api.generation.prompt_parser import LONG_TEXT_CHARACTERS, TOO_LONG
from draftproof.serve.api.generation.request_schema import DetokenizeRequest, TokenizeRequest
from draftproof.serve.http.errors import ApiError
from draftproof.serve.http.io import in_thread_if, read_json, send_body, send_json
from draftproof.serve.http.request_guard import RequestGuard
from draftproof.serve.settings import Settings

NUM_THREADS = 2
MIN_TRIMMED_TOKENS = 1 << 16  # after longer texts unused memory is returned to the system


class TokenRoutes:
    """Handlers of the routes that need the tokenizer only."""

    def __init__(
        self, llm: Any, settings: Settings, guard: RequestGuard, completions: CompletionHandler
    ) -> None:
        self._llm, self._settings, self._guard = llm, settings, guard
        self._completions, self._prompts = completions, completions.prompts
        self._pool = ThreadPoolExecutor(NUM_THREADS, "draftproof-tokenize")

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return the tokens of a prompt or a conversation."""
        with self._guard.admit(scope["state"]["record"]):
            body = await read_json(scope, receive, self._settings, TokenizeRequest, self._pool)
            self._completions.check_model(body.model)
            ids = await self._tokens(body)
            build = partial(self._tokenize_response, ids, bool(body.return_token_strs))
            data = await in_thread_if(len(ids) > LONG_TEXT_CHARACTERS, build, self._pool)
        await send_body(send, data)

    async def _tokens(self, body: TokenizeRequest) -> list[int]:
        if (body.prompt is UNSET) == (body.messages is UNSET):
            raise ApiError(400, "give a prompt or messages", "prompt")
        if isinstance(body.prompt, str):
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
                if getattr(body, name) is not None:
                    raise ApiError(400, f"{name} is for messages", name)
            return await self._prompts.encode(body.prompt, body.add_special_tokens is not False, self._pool)
        if body.add_special_tokens is not None:
            text = "add_special_tokens is for a prompt: the chat template adds its own"
            raise ApiError(400, text, "add_special_tokens")
        return await self._prompts.conversation(body, self._pool)

    def _tokenize_response(self, ids: list[int], with_strings: bool) -> bytes:
        length, strings = self._llm.limits.max_model_len, self._completions.token_strings
        response = schema.TokenizeResponse(count=len(ids), max_model_len=length, tokens=ids)
        if with_strings:
            response.token_strs = [strings[i][0] for i in ids]
        data = msgspec.json.encode(response)
        if len(ids) > MIN_TRIMMED_TOKENS:
            _return_memory()
        return data

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return the text of tokens."""
        with self._guard.admit(scope["state"]["record"]):
            body = await read_json(scope, receive, self._settings, DetokenizeRequest, self._pool)
            self._completions.check_model(body.model)
            limits, count = self._llm.limits, len(body.tokens)
            if count > limits.max_model_len:
                text = f"tokens: {count} tokens, and the maximum is {limits.max_model_len}"
                raise ApiError(400, text, "tokens", TOO_LONG)
            if body.tokens and max(body.tokens) >= limits.vocab_size:
                text = f"tokens: {max(body.tokens)} is outside the vocabulary 0..{limits.vocab_size - 1}"
                raise ApiError(400, text, "tokens")
            decode = partial(self._prompts.tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
            text = await in_thread_if(count > LONG_TEXT_CHARACTERS, decode, self._pool)
        await send_json(send, schema.DetokenizeResponse(prompt=text))

    async def tokenizer_info(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Describe the tokenizer: special tokens, chat template, sizes."""
        tokenizer = self._prompts.tokenizer
        template = tokenizer.chat_template
        names = schema.TokenizerInfo.__struct_fields__
        special = {name: text for name, text in tokenizer.special_tokens.items() if name in names}
        info = schema.TokenizerInfo(
            **special,
            chat_template=None if template is None else template.source,
            vocab_size=tokenizer.vocab_size,
            model_max_length=self._llm.limits.max_model_len,
        )
        await send_json(send, info)


def _return_memory() -> None:
    """Return unused memory to the system: glibc keeps what the tokenizer has freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
