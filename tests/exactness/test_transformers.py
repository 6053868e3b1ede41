"""Logits and logprobs of tiny random models of every architecture against transformers in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.models.load import load_checkpoint
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
from draftproof.ops import resolve
from draftproof.sampling_params import SamplingParams
from opcheck import check_order
from tiny import request, run

CPU = torch.device("cpu")
VOCAB, LENGTH = 199, 90
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # with 0.02 logits are almost flat
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = scaled(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=64)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", LLAMA3),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "linear_rope": ("Llama", scaled("linear", factor=4.0)),
    "yarn": ("Llama", YARN),
    "mistral": ("Mistral", {"sliding_window": 17}),
    "mistral_head_dim": ("Mistral", {"sliding_window": None, "head_dim": 20}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 24, "num_key_value_heads": 2}),
    "ernie4_5_bias": ("Ernie4_5", {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False}),
    "qwen3_tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True, "attention_bias": True}),
}
every = pytest.mark.parametrize("name", MODELS)


def make(name: str, folder: Path) -> Any:
    """Save a random model of transformers in `folder`; biases and norms are random too."""
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**_BASE, **options})
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim == 1:
                value.copy_(torch.randn_like(value) * 0.3 + (1.0 if "norm" in key else 0.0))
    model.save_pretrained(folder)
    return model


def tokens_of(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def ours(folder: Path, tokens: Tensor, chunk: int, backend: str = "auto") -> Tensor:
    """Return logits of every position, the prompt in chunks, on pages out of order."""
    checkpoint = load_checkpoint(folder, dtype="float32")
    ops = resolve(backend, CPU)
    model = create_model(checkpoint.config, checkpoint.weights, ops, 128)
    runner = Runner(model, ops, torch.float32, num_pages=20, page_size=8, max_rows=len(tokens))
    table = (1 + torch.randperm(16, generator=torch.Generator().manual_seed(2)))[None].to(torch.int32)
    out = []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        positions = torch.arange(start, start + len(part))
        hidden = runner.forward(runner.rows(part, positions, torch.zeros_like(part), table))
        out.append(runner.logits(hidden).clone())
    return torch.cat(out)


@torch.inference_mode()
def theirs(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens[None]).logits[0]
    return logits


def error(got: Tensor, want: Tensor) -> float:
    """Return the largest difference of a row relative to its largest logit."""
    return float(((got - want).abs().amax(-1) / want.abs().amax(-1)).max())


@every
def test_logits_equal_transformers_within_tolerance(name: str, tmp_path: Path) -> None:
    """Logits are within 1e-4 at every position and do not depend on the chunk size."""
    tokens = tokens_of()
    want = theirs(make(name, tmp_path), tokens)
    assert float(want.std()) > 0.5, "logits are flat"
    whole = ours(tmp_path, tokens, LENGTH)
    assert error(whole, want) < 1e-4
    for chunk in (1, 16, 37):
        assert torch.equal(ours(tmp_path, tokens, chunk), whole)


@pytest.mark.parametrize("name", ("llama3", "mistral", "qwen3"))
def test_logits_of_the_torch_backend_equal_transformers(name: str, tmp_path: Path) -> None:
    tokens = tokens_of(40)
    model = make(name, tmp_path)
    assert error(ours(tmp_path, tokens, 16, "torch"), theirs(model, tokens)) < 1e-4


@every
def test_prompt_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    """Logprobs are within 1e-4; entries nearer than 1e-4 may swap places."""
    tokens = tokens_of(60)
    want = torch.log_softmax(theirs(make(name, tmp_path), tokens).double(), -1)
    config = EngineConfig(model=name, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=16)
    engine = Engine(config, load_checkpoint(tmp_path, dtype="float32"))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20, logprobs=20)
    record = run(engine, [request(0, params, prompt_token_ids=tokens.tolist())])["0"]
    lines = [*record.prompt_logprobs, *record.logprobs]
    assert len(lines) == len(tokens)
    assert record.token_ids == [int(want[-1].argmax())]
    for position, line in enumerate(lines):
        row = want[position]
        own = torch.tensor(line.logprobs, dtype=torch.float64)
        assert float((own - row[line.token_ids]).abs().max()) < 1e-4
        check_order(line.token_ids[1:], row)


# --- negative controls ---


def test_control_wrong_window_is_detected(tmp_path: Path) -> None:
    model = make("mistral", tmp_path)
    model.config.sliding_window = 16
    model.save_pretrained(tmp_path)
    model.config.sliding_window = 17
    assert error(ours(tmp_path, tokens_of(), LENGTH), theirs(model, tokens_of())) > 1e-3


def test_control_missing_rope_scaling_is_detected(tmp_path: Path) -> None:
    model = make("llama3", tmp_path)
    plain = tmp_path / "plain"
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    model.save_pretrained(plain)
    assert error(ours(plain, tokens_of(), LENGTH), theirs(model, tokens_of())) > 1e-3


def test_control_weight_off_by_a_hundredth_is_detected(tmp_path: Path) -> None:
    model = make("qwen2", tmp_path)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.bias[3] += 0.01
    assert error(ours(tmp_path, tokens_of(), LENGTH), theirs(model, tokens_of())) > 1e-4


def test_control_wrong_order_is_detected() -> None:
    with pytest.raises(AssertionError):
        check_order([1, 0], torch.tensor([2.0, 1.0, 0.0]))
    check_order([1, 0], torch.tensor([2.0, 2.0 - 1e-5, 0.0]))
