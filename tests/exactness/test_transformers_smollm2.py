"""SmolLM2 in fp32 against transformers: equal greedy tokens and close logprobs on real prompts.

Both sides use the weights of the GGUF loader. Greedy tokens are checked by one forward pass of transformers
over prompt and output, whose argmax at every position must be the next token. In the top-20 lists two values
nearer than 1e-4 may swap: transformers itself is off by up to 7e-5 against fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.initialization import no_init_weights

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.models.load import Checkpoint
from draftproof.sampling_params import SamplingParams
from draftproof.text.tokenizer import load_tokenizer
from exact import NUM_THREADS, num_threads
from opcheck import check_order
from tiny import Record, request, run

TOKENS = 12
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "def fibonacci(n):\n    # complete this Python function",
    "If a train travels 60 km in 45 minutes, what is its speed in km/h?",
    "Summarise in one sentence: The quick brown fox jumps over the lazy dog. The dog does not mind.",
    "Repeat the word 'echo' ten times.",
    "Convert this to JSON: name is Ana, age is 31, city is Porto.",
    "Quelle est la différence entre un crocodile et un alligator ?",
    "Say hello in five languages. 你好!",
)


@dataclass
class Both:
    prompts: list[list[int]]
    records: list[Record]
    logprobs: list[Tensor]  # transformers', [TOKENS, vocab] of each prompt


def peer(checkpoint: Checkpoint) -> Any:
    """Return a model of transformers with the same weights."""
    c = checkpoint.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
    )
    with no_init_weights():  # random weights would take seconds; `load_state_dict` checks that none is left
        model = transformers.LlamaForCausalLM(config).eval()
    state = {**checkpoint.tensors, "lm_head.weight": checkpoint.tensors["model.embed_tokens.weight"]}
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="module")
def both(smollm2: Callable[[str], Checkpoint]) -> Both:
    checkpoint = smollm2("float32")
    tokenizer = load_tokenizer(checkpoint.source)
    prompts = [
        tokenizer.encode(
            f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        )
        for text in QUESTIONS
    ]
    model = peer(checkpoint)
    config = EngineConfig(model="smollm2-135m", max_model_len=256, max_num_seqs=len(prompts))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=20)
    cases = [request(i, params, prompt_token_ids=ids) for i, ids in enumerate(prompts)]
    logprobs = []
    with num_threads(NUM_THREADS), torch.inference_mode():
        served = run(Engine(config, checkpoint), cases)
        records = [served[str(i)] for i in range(len(prompts))]
        for ids, record in zip(prompts, records, strict=True):
            text = torch.tensor([[*ids, *record.token_ids[:-1]]])
            logits = model(text, logits_to_keep=TOKENS).logits[0]
            logprobs.append(torch.log_softmax(logits.double(), -1).float())
    return Both(prompts, records, logprobs)


def test_greedy_tokens_equal_transformers(both: Both) -> None:
    assert len(both.records) == len(QUESTIONS)
    for question, record, want in zip(QUESTIONS, both.records, both.logprobs, strict=True):
        assert len(record.token_ids) == TOKENS
        assert record.token_ids == want.argmax(-1).tolist(), question


def test_logprobs_are_within_1e_4(both: Both) -> None:
    worst = 0.0
    for record, want in zip(both.records, both.logprobs, strict=True):
        assert len(record.logprobs) == TOKENS
        for line, row in zip(record.logprobs, want, strict=True):
            got = torch.tensor(line.logprobs)
            off = (got - row[line.token_ids]).abs()
            worst = max(worst, float(off.max()))
    assert worst < 1e-4


def test_top_20_ids_equal_transformers_in_order(both: Both) -> None:
    swapped = 0
    for record, want in zip(both.records, both.logprobs, strict=True):
        for line, row in zip(record.logprobs, want, strict=True):
            ids = line.token_ids[1:]
            assert len(ids) == 20 and line.ranks[1:] == list(range(1, 21))
            check_order(ids, row)
            swapped += ids != row.topk(20).indices.tolist()
    # Few lists have swapped entries: 6 of 240 on a Neoverse-N1.
    assert swapped < 0.04 * len(QUESTIONS) * TOKENS
