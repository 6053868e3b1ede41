"""Exactness on SmolLM2-135M from GGUF in bf16 and fp32 with real prompts."""

from __future__ import annotations

from functools import cache

import pytest

import proposers
import tiny
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.propose import PROPOSERS
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.text.tokenizer import load_tokenizer
from draftproof.types import Request
from exact import NUM_THREADS, check_empty, compare, num_threads

LIST = "".join(f"{i}. The cat sat on the mat and looked at the dog.\n" for i in range(1, 10))
PROMPTS = [
    (LIST + "10.", {}),  # longer than a span of 128 keys; its continuation is a copy
    ("The capital of France is", {"frequency_penalty": 0.8, "logprobs_mode": "processed"}),
    ("def fibonacci(n):\n    if n", {"top_p": 0.9, "min_tokens": 8}),
    ("Once upon a time there was a", {"top_k": 40, "repetition_penalty": 1.2}),
]


@pytest.fixture(scope="module")
def model(smollm2, smollm2_path):
    """Return functions for requests, engines and cached reference runs."""
    tokenizer = load_tokenizer(smollm2_path)
    ids = [tokenizer.encode(text) for text, _ in PROMPTS]
    assert len(ids[0]) > 128

    def request(index: int, temperature: float, k: int | None = None) -> Request:
        options = {"max_tokens": 8, "logprobs": 5, **PROMPTS[index][1]}
        speculative = {"num_speculative_tokens": k}
        params = SamplingParams(temperature=temperature, speculative=speculative, **options)
        return tiny.request(index, params, prompt_token_ids=ids[index], eos_token_ids=tokenizer.eos_token_ids)

    @cache
    def engine(dtype: str, speculates: bool) -> Engine:
        spec = {"method": "ngram", "num_speculative_tokens": 8, "adaptive": False}
        config = EngineConfig(
            model="smollm2-135m",
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=48 if speculates else 512,  # splits the long prompt
            debug=True,
            speculative=SpeculativeConfig.parse(spec) if speculates else None,
        )
        with num_threads(NUM_THREADS):
            return Engine(config, smollm2(dtype))

    @cache
    def reference_run(dtype: str, index: int, temperature: float) -> tiny.Record:
        one = request(index, temperature)
        return tiny.run(engine(dtype, False), [one])[one.id]

    return request, engine, reference_run


def set_proposer(engine: Engine, method: str, overlap: bool) -> None:
    """Put another proposer into an engine, since packing the weights again is slow."""
    kind, loop = lookup(PROPOSERS, method, "method"), engine.loop
    assert not engine.has_work
    loop.pending.clear()  # a last step of finished requests
    loop.hooks.proposer = kind(loop.proposer.env, {})
    loop.sources = kind.sources
    loop.device.drafting.proposer = loop.proposer if kind.graph_safe else None
    loop.overlap = overlap and kind.graph_safe


BF16, FP32 = "bfloat16", "float32"
CASES = [  # method, drafts, requests, dtype, temperature, overlap
    ("ngram", 3, 4, BF16, 0.0, False),
    ("ngram", 8, 1, FP32, 0.8, False),
    ("proposers:Junk", 3, 4, FP32, 0.0, False),
    ("proposers:Junk", 8, 1, BF16, 0.0, False),
    ("proposers:Flaky", 8, 4, FP32, 0.0, False),
    ("ngram", 8, 4, FP32, 0.8, True),
    ("proposers:DeviceFlaky", 8, 4, BF16, 0.8, True),
    ("proposers:DeviceFlaky", 8, 4, FP32, 0.0, True),
]


@pytest.mark.parametrize(("method", "k", "batch", "dtype", "temperature", "overlap"), CASES)
def test_smollm2_is_exact(model, method, k, batch, dtype, temperature, overlap):
    request, engine, reference_run = model
    alone = {str(i): reference_run(dtype, i, temperature) for i in range(batch)}
    proposers.set_outputs({name: record.token_ids for name, record in alone.items()})
    target = engine(dtype, True)
    set_proposer(target, method, overlap)
    records = tiny.run(target, [request(i, temperature, k) for i in range(batch)], arrivals=[0, 2, 2, 5])
    check_empty(target)
    assert [line for name in alone for line in compare(name, alone[name], records[name])] == []
    if method == "ngram" and temperature == 0:  # the continuation is a copy
        assert sum(step.num_accepted for step in records["0"].steps) >= 5
