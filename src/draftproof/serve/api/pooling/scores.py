"""Handlers of /v1/score and /v1/rerank.

A score is the probability of the second of two tokens, of a reranker that the server was started for; the
cosine of two embeddings, of a model for embeddings; otherwise the log-likelihood of a continuation.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from draftproof.errors import ConfigError
from draftproof.frontend.continuation_scores import check_finished, score_output
from draftproof.frontend.pooler import PoolingParams
from draftproof.outputs import EmbeddingRequestOutput, RequestOutput
from draftproof.sampling_params import SamplingParams
from draftproof.serve.api.generation.prompt_parser import ParsedPrompt, prompt_list
from draftproof.serve.api.pooling import schema
from draftproof.serve.api.pooling.handler import MAX_INLINE_NUMBERS, PoolingRoutes, prompt_usage
from draftproof.serve.http.errors import ApiError
from draftproof.serve.http.io import in_thread_if
from draftproof.serve.http.request_log import RequestRecord

NO_RELEVANCE = (
    "this model is not known as a reranker or as a model for embeddings: start the server with "
    "--classifier-from-token, or with --pooling-type if its embeddings are meant to be compared"
)


class ScoreRoutes:
    """Handlers of the routes that compare two texts."""

    def __init__(self, pooling: PoolingRoutes) -> None:
        self._pooling, self._llm = pooling, pooling.llm
        self._class_ids: list[int] = []  # of the tokens for "no" and "yes"
        for text in pooling.settings.classifier_from_token:
            ids = pooling.prompts.tokenizer.encode(text, add_special_tokens=False)
            if len(ids) != 1:
                raise ConfigError(f"classifier_from_token: {text!r} is {len(ids)} tokens, and one is needed")
            self._class_ids += ids

    async def score(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return the scores of pairs of texts."""
        await self._pooling.serve(scope, receive, send, schema.ScoreRequest, "score", self._score)

    async def rerank(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return documents in the order of their relevance to a query."""
        await self._pooling.serve(scope, receive, send, schema.RerankRequest, "rerank", self._rerank)

    def _score_type(self, wanted: schema.ScoreType | None) -> schema.ScoreType:
        """Return the kind of score of this model, or the one of the request."""
        kind: schema.ScoreType = "log_likelihood"
        if self._class_ids:
            kind = "probability"
        elif self._llm.is_embedding_model:
            kind = "cosine"
        if wanted in (None, "log_likelihood", kind):
            return wanted or kind
        raise ApiError(400, f"score_type: {wanted} is not available: {NO_RELEVANCE}", "score_type")

    async def _score(self, body: schema.ScoreRequest, head: dict[str, Any], record: RequestRecord) -> bytes:
        kind = self._score_type(body.score_type)
        if kind == "log_likelihood":
            return await self._likelihoods(body, head, record)
        scores, usage = await self._relevance(kind, body, ("text_1", "text_2"), record)
        data = [schema.Score(index=i, score=score) for i, score in enumerate(scores)]
        return msgspec.json.encode(schema.ScoreResponse(**head, data=data, usage=usage, score_type=kind))

    async def _rerank(self, body: schema.RerankRequest, head: dict[str, Any], record: RequestRecord) -> bytes:
        kind = self._score_type(None)
        if kind == "log_likelihood":
            raise ApiError(400, NO_RELEVANCE, code="unsupported_option")
        scores, usage = await self._relevance(kind, body, ("query", "documents"), record)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])  # equal ones keep their order
        results = [
            schema.RerankResult(
                index=i, document=schema.RerankDocument(text=body.documents[i]), relevance_score=scores[i]
            )
            for i in order[: body.top_n or None]
        ]
        del head["created"]
        return msgspec.json.encode(schema.RerankResponse(**head, usage=usage, results=results))

    async def _relevance(
        self,
        kind: schema.ScoreType,
        body: schema.ScoreRequest | schema.RerankRequest,
        names: tuple[str, str],
        record: RequestRecord,
    ) -> tuple[list[float], schema.PromptUsage]:
        """Return the score of each pair; `names`: options that have the two sides."""
        if kind == "cosine":
            return await self._cosines(body, names, record)
        left, right = (prompt_list(getattr(body, name), name) for name in names)
        left = _paired(left, right, names[1])
        if len({type(one) for one in (*left, *right)}) > 1:
            raise ApiError(400, f"{names[1]}: texts and token ids cannot be mixed", names[1])
        joined = [a + b for a, b in zip(left, right, strict=True)]
        prompts = await self._pooling.inputs(
            joined, body.add_special_tokens, names[1], body.truncate_prompt_tokens
        )
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            logprob_token_ids=self._class_ids,
            priority=body.priority or 0,
            cache_salt=self._pooling.salt(body, record),
        )
        outputs: list[RequestOutput] = await self._pooling.run(self._llm.generate, prompts, params, record)
        return [self._probability(output) for output in outputs], prompt_usage(prompts, outputs)

    def _probability(self, output: RequestOutput) -> float:
        """Return the probability of the second token against the first one."""
        check_finished(output)
        rows = output.outputs[0].logprobs
        assert rows is not None and rows[0] is not None
        no, yes = (rows[0][token].logprob for token in self._class_ids)
        return 1 / (1 + math.exp(min(no - yes, 700.0)))  # e^700 is near the largest float

    async def _cosines(
        self, body: schema.ScoreRequest | schema.RerankRequest, names: tuple[str, str], record: RequestRecord
    ) -> tuple[list[float], schema.PromptUsage]:
        params = PoolingParams(
            normalize=True, priority=body.priority or 0, cache_salt=self._pooling.salt(body, record)
        )
        self._llm.check_embedding(params)
        sides = [
            await self._pooling.inputs(
                getattr(body, name), body.add_special_tokens, name, body.truncate_prompt_tokens
            )
            for name in names
        ]
        prompts = [*sides[0], *sides[1]]
        _paired(sides[0], sides[1], names[1])
        outputs: list[EmbeddingRequestOutput] = await self._pooling.run(
            self._llm.embed, prompts, params, record
        )
        rows = [output.outputs.embedding for output in outputs]
        right = rows[len(sides[0]) :]
        left = _paired(rows[: len(sides[0])], right, names[1])
        scores = [float(np.dot(a, b)) for a, b in zip(left, right, strict=True)]  # of length 1, in fp64
        return scores, prompt_usage(prompts, outputs)

    async def _likelihoods(
        self, body: schema.ScoreRequest, head: dict[str, Any], record: RequestRecord
    ) -> bytes:
        if body.truncate_prompt_tokens is not None:
            text = "truncate_prompt_tokens is for the scores of rerankers and embeddings"
            raise ApiError(400, text, "truncate_prompt_tokens")
        contexts = await self._pooling.inputs(body.text_1, body.add_special_tokens, "text_1")
        continuations = await self._pooling.inputs(body.text_2, False, "text_2")
        contexts = _paired(contexts, continuations, "text_2")
        params = SamplingParams(
            max_tokens=0,
            prompt_logprobs=0,
            priority=body.priority or 0,
            cache_salt=self._pooling.salt(body, record),
        )
        prompts = [ParsedPrompt(a.ids + b.ids) for a, b in zip(contexts, continuations, strict=True)]
        for prompt in prompts:
            self._pooling.prompts.check_length(prompt, "text_2")
        outputs: list[RequestOutput] = await self._pooling.run(self._llm.generate, prompts, params, record)

        def encode() -> bytes:
            pairs = zip(contexts, outputs, strict=True)
            found = [score_output(len(context.ids), output) for context, output in pairs]
            data = [
                schema.Score(
                    index=i,
                    score=one.logprob,
                    is_greedy=one.is_greedy,
                    token_ids=one.token_ids,
                    token_logprobs=one.token_logprobs,
                )
                for i, one in enumerate(found)
            ]
            usage = prompt_usage(prompts, outputs)
            response = schema.ScoreResponse(**head, data=data, usage=usage, score_type="log_likelihood")
            return msgspec.json.encode(response)

        return await in_thread_if(sum(len(prompt.ids) for prompt in prompts) > MAX_INLINE_NUMBERS, encode)


def _paired(left: list[Any], right: list[Any], name: str) -> list[Any]:
    """Return one left side for each right side, from one for all or one each."""
    if len(left) == 1:
        return left * len(right)
    if len(left) != len(right):
        text = f"{name}: {len(left)} contexts and {len(right)} continuations: give one context or one each"
        raise ApiError(400, text, name)
    return left
