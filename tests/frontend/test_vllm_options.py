"""Engine options of vLLM: accepted, mapped or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, ConfigError, EngineConfig, RequestError, SamplingParams
from draftproof.compat.vllm_options import RULES
from text_pieces import make_llm, output_fields

SCRIPT_OPTIONS: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "trust_remote_code": True,
    "enforce_eager": True,
    "disable_log_stats": True,
    "enable_chunked_prefill": True,
    "block_size": 16,
    "served_model_name": "model",
    "tokenizer_mode": "auto",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "seed": 0,
    "swap_space": 0,
    "enable_prefix_caching": None,
    "hf_overrides": {},
    "enable_lora": False,
    "scheduling_policy": "fcfs",
    "logprobs_mode": "raw_logprobs",
    "gpu_memory_utilization": 0.9,
    "max_num_seqs": 4,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_of_a_vllm_script_change_no_output(tmp_path: Path, temperature: float) -> None:
    """Compare all options of a script with none, with and without drafts."""
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=20, logprobs=3)
    results = []
    for spec, options in ((None, {}), (None, SCRIPT_OPTIONS), (NGRAM, SCRIPT_OPTIONS)):
        with make_llm(tmp_path, spec, **options) as llm:
            results.append(output_fields(llm.generate("abab", params)[0].outputs[0]))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", sorted(RULES))
def test_unset_vllm_option_is_accepted_and_another_value_refused(name: str) -> None:
    """Check both sides of every rule: None, and a value that no rule can accept."""
    assert EngineConfig.parse("model", {name: None}) == EngineConfig.parse("model", {})
    with pytest.raises(ConfigError, match=f"{name}=<object .* is not supported: .{{9}}"):
        EngineConfig.parse("model", {name: object()})


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"pipeline_parallel_size": 2}, "tensor_parallel_size"),
        ({"tensor_parallel_size": True}, "positive integer"),
        ({"quantization": "awq"}, "must be one of auto, none, int8, fp8, int4, gguf"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens"),
        ({"tokenizer_mode": "slow"}, "tokenizer.json"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "must be one of auto, int8, fp8, fp8_e4m3"),
        ({"calculate_kv_scales": True}, "each token and head"),
        ({"enable_lora": True}, "merge the adapter"),
        ({"logprobs_mode": "processed_logprobs"}, "option of a request"),
        ({"dtype": "float16"}, "use 'bfloat16'"),
        ({"dtype": "half"}, "'float32', which holds float16 weights exactly"),
        ({"dtype": torch.float16}, "use 'bfloat16'"),
        ({"num_gpu_blocks_override": 0}, "positive integer"),
        ({"num_gpu_blocks_override": 4, "kv_cache_tokens": 64}, "leave one out"),
        ({"async_scheduling": True, "overlap": False}, "twice"),
        ({"skip_tokenizer_init": True, "tokenizer": "x"}, "leave one out"),
        ({"tensor_paralel_size": 1}, "unknown option"),
    ],
)
def test_option_that_is_not_honoured_is_refused_with_advice(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        EngineConfig.parse("model", options)


def test_values_in_the_notation_of_vllm_are_mapped() -> None:
    given = {
        "dtype": torch.float32,
        "num_gpu_blocks_override": 10,
        "block_size": 32,
        "async_scheduling": True,
    }
    config = EngineConfig.parse("model", given)
    assert (config.dtype, config.kv_cache_tokens, config.page_size, config.overlap) == (
        "float32",
        320,
        32,
        True,
    )
    assert EngineConfig.parse("model", {"block_size": None}).page_size == 16


def test_engine_without_tokenizer_serves_token_ids(smollm2_path: Path) -> None:
    """Compare token ids with those of an engine that has its tokenizer; a text is refused."""
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM("smollm2-135m", max_num_seqs=2, warm_up=False) as full:
        ids = full.tokenizer.encode("The capital of France is")
        expected = full.generate([ids], params)[0].outputs[0]
    with LLM("smollm2-135m", max_num_seqs=2, warm_up=False, skip_tokenizer_init=True) as llm:
        found = llm.generate([ids], params)[0].outputs[0]
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.generate("The capital")
    assert found.token_ids == expected.token_ids and (found.text, bool(expected.text)) == ("", True)


def test_pooler_config_is_mapped() -> None:
    given = {"pooler_config": {"pooling_type": "MEAN", "normalize": False}, "runner": "pooling"}
    config = EngineConfig.parse("m", given)
    assert config.pooling_type == "mean" and config.normalize_embeddings is False
    for wrong in ({"pooling_type": "CLS"}, {"softmax": True}, 5):
        with pytest.raises(ConfigError, match="pool"):
            EngineConfig.parse("m", {"pooler_config": wrong})
