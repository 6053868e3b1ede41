"""Tiny random models of every architecture, and a loop that records all outputs of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.metrics import RequestStats
from draftproof.models.config import LatentConfig, LayerNorms, ModelConfig, MoeConfig, RopeScaling
from draftproof.models.load import Checkpoint, load_checkpoint
from draftproof.ops import Routing
from draftproof.outputs import LogprobRow
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import Request, StepOutput
from quantized_files import mxfp4_weight

VOCAB = 97
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position": 512,
    "eos_token_ids": (2,),
}
LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM"},
    "llama3": {"architecture": "LlamaForCausalLM", "rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "smollm2": {"architecture": "LlamaForCausalLM", "tie_embeddings": True, "num_kv_heads": 1},
    "mistral": {"architecture": "MistralForCausalLM", "windows": (9, 9)},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "tie_embeddings": True},
    "ernie4_5": {
        "architecture": "Ernie4_5ForCausalLM",
        "rope_interleaved": True,
        "head_dim": 16,
        "tie_embeddings": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "head_dim": 16},
    "qwen3_moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "qk_norm": True,
        "moe": MoeConfig(Routing(8, 3), intermediate_size=32),
    },
    "ernie4_5_moe": {
        "architecture": "Ernie4_5_MoeForCausalLM",
        "rope_interleaved": True,
        "tie_embeddings": True,
        "moe": MoeConfig(
            Routing(8, 2, num_groups=4, top_groups=2, scoring="sigmoid", group_score="top2_sum", scale=2.0),
            intermediate_size=32,
            dense_layers=(0,),
            shared_intermediate_size=40,
            correction="mlp.moe_statics.e_score_correction_bias",
            is_correction_row=True,
        ),
    },
    "mixtral": {
        "architecture": "MixtralForCausalLM",
        "moe": MoeConfig(
            Routing(4, 2),
            intermediate_size=32,
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            projections=("w1", "w3", "w2"),
        ),
    },
    "glm4_moe": {
        "architecture": "Glm4MoeForCausalLM",
        "qkv_bias": True,
        "qk_norm": True,
        "partial_rotary_dim": 4,
        "moe": MoeConfig(
            Routing(4, 2, "sigmoid", group_score="top2_sum", scale=1.5),
            intermediate_size=16,
            dense_layers=(0,),
            shared_intermediate_size=16,
            correction="mlp.gate.e_score_correction_bias",
        ),
    },
    "qwen2_moe": {
        "architecture": "Qwen2MoeForCausalLM",
        "qkv_bias": True,
        "moe": MoeConfig(
            Routing(6, 2, normalize=False),
            intermediate_size=32,
            dense_layers=(0,),
            shared_intermediate_size=40,
            has_shared_gate=True,
            shared="mlp.shared_expert",
        ),
    },
    "gpt_oss": {
        "architecture": "GptOssForCausalLM",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "has_sinks": True,
        "windows": (9, 0),
        "activation": "swiglu_oai",
        "moe": MoeConfig(Routing(6, 2), 32, router="mlp.router", has_router_bias=True),
    },
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "qk_norm": True,
        "windows": (9, 0),
        "local_rope_theta": 500.0,
        "norms": LayerNorms("input_layernorm", "post_attention_layernorm", "pre_mlp_norm", "post_mlp_norm"),
        "activation": "gelu_tanh",
        "attention_scale": 0.3,
        "embedding_scale": 32**0.5,
        "tie_embeddings": True,
    },
    "glm4": {
        "architecture": "Glm4ForCausalLM",
        "qkv_bias": True,
        "partial_rotary_dim": 4,
        "norms": LayerNorms(attention_output="post_self_attn_norm", mlp_output="post_mlp_norm"),
    },
    "olmo2": {
        "architecture": "Olmo2ForCausalLM",
        "qk_row_norm": True,
        "norms": LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    },
    "granite": {
        "architecture": "GraniteForCausalLM",
        "attention_scale": 0.3,
        "embedding_scale": 3.0,
        "residual_scale": 0.7,
        "logit_scale": 0.6,
        "no_rope_layers": (1,),  # as SmolLM3
    },
}


LATENT = LatentConfig(q_rank=24, kv_rank=32, nope_dim=12, value_dim=10, scale=0.2)
ARCHITECTURES["deepseek_v2"] = {  # as V2-Lite: queries without a low-rank projection
    "architecture": "DeepseekV2ForCausalLM",
    "latent": replace(LATENT, q_rank=0),
    "num_kv_heads": 4,
}
ARCHITECTURES["deepseek_v3"] = {
    "architecture": "DeepseekV3ForCausalLM",
    "latent": LATENT,
    "num_kv_heads": 4,
    "moe": MoeConfig(
        Routing(8, 3, "sigmoid", num_groups=4, top_groups=2, group_score="top2_sum", scale=2.5),
        intermediate_size=16,
        dense_layers=(0,),
        shared_intermediate_size=16,
        correction="mlp.gate.e_score_correction_bias",
    ),
}


MXFP4 = {"gpt_oss_mxfp4": ARCHITECTURES["gpt_oss"]}  # with experts in mxfp4


def model_config(name: str) -> ModelConfig:
    return ModelConfig(**{**_BASE, **{**ARCHITECTURES, **MXFP4}[name]})


@cache
def _weights(name: str, dtype: str) -> Checkpoint:
    """Return scaled random weights; unscaled logits are flat and hardly depend on the context."""
    made = load_checkpoint(model_config(name), dtype=dtype, load_format="dummy", seed=3)
    for key, tensor in made.tensors.items():
        if tensor.dim() == 2:
            tensor *= 16 if "embed" in key or "lm_head" in key else 8  # powers of two: exact in bf16
            if name in MXFP4 and ".experts." in key:
                made.weights[key] = mxfp4_weight(tensor)
    return made


def checkpoint(name: str = "llama", dtype: str = "float32") -> Checkpoint:
    """Return a new checkpoint, since building an engine empties it."""
    made = _weights(name, dtype)
    return made.copy()


def engine(
    name: str = "llama",
    dtype: str = "float32",
    speculative: dict[str, Any] | SpeculativeConfig | None = None,
    **options: Any,
) -> Engine:
    if isinstance(speculative, dict):
        speculative = SpeculativeConfig.parse(speculative)
    defaults = {
        "max_model_len": 256,
        "device": "cpu",  # also on a machine with a GPU: tests/gpu selects it by name
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "warm_up": False,  # on a GPU steps are captured at first use
        "debug": True,
    }
    config = EngineConfig(model=name, speculative=speculative, **{**defaults, **options})
    return Engine(config, checkpoint(name, dtype))


def prompt(index: int, length: int = 12, vocab: int = VOCAB) -> list[int]:
    """Return a prompt that repeats, so that n-grams match, and differs by index."""
    return [3 + (index * 13 + (j % 5) * 7 + j // 9) % (vocab - 3) for j in range(length)]


def request(index: int, params: SamplingParams, length: int = 12, **fields: Any) -> Request:
    values = {"seed": 1000 + index, "eos_token_ids": (2,), **fields}
    ids = values.pop("prompt_token_ids", prompt(index, length))
    return Request(id=str(index), prompt_token_ids=ids, params=params, **values)


@dataclass
class Record:
    """Outputs of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: list[LogprobRow] = field(default_factory=list)
    steps: list[StepOutput] = field(default_factory=list)
    finish: tuple[object, object, object] = (None, None, None)

    def same(self) -> tuple[object, ...]:
        """Return the outputs that speculation must not change."""
        return self.token_ids, self.logprobs, self.prompt_logprobs, self.finish


def run(
    target: Engine,
    requests: Sequence[Request],
    arrivals: Sequence[int] = (),
    each_step: Callable[[int], None] | None = None,
    stats: dict[str, RequestStats] | None = None,
) -> dict[str, Record]:
    """Serve all requests; request i is added before step arrivals[i], by default 0. Fill `stats`."""
    counts = {} if stats is None else stats
    records = {r.id: Record() for r in requests}
    when = {r.id: (arrivals[i] if i < len(arrivals) else 0) for i, r in enumerate(requests)}
    step, waiting = 0, list(requests)
    while waiting or target.has_work:
        for item in [r for r in waiting if when[r.id] <= step]:
            waiting.remove(item)
            counts[item.id] = target.add(item)
        for out in target.step():
            record = records[out.request_id]
            record.steps.append(out)
            record.token_ids.extend(out.token_ids)
            record.logprobs.extend(out.logprobs or [])
            record.prompt_logprobs.extend(out.prompt_logprobs or [])
            if out.finish_reason:
                record.finish = (out.finish_reason, out.stop_reason, out.error)
        if each_step:
            each_step(step)
        step += 1
        assert step < 5000, "the engine makes no progress"
    return records
