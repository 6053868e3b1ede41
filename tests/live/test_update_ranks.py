"""Weight updates and sleep of an engine with several ranks: outputs are those of a fresh engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import heads
import tiny
from checkpoint_copies import copy_of
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.engine.parallel.sharded_weights import SplitWeights
from draftproof.errors import LoadError
from draftproof.models.load import Checkpoint
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from rank_threads import rank_threads

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, logprobs=1, ignore_eos=True)
SIZES = {"max_model_len": 64, "max_num_seqs": 2, "kv_cache_tokens": 128, "max_num_batched_tokens": 32}


def engine_of(checkpoint: Checkpoint, size: int, method: str = "ngram", **options: Any) -> Engine:
    name = next(key for key in tiny.ARCHITECTURES if tiny.model_config(key) == checkpoint.config)
    values = {"method": method, "num_speculative_tokens": 2, **heads.options(method, name, "float32")}
    options |= {**SIZES, "device": "cpu", "warm_up": False, "debug": True, "enable_sleep_mode": True}
    config = EngineConfig(
        model=name,
        speculative=SpeculativeConfig.parse(values),
        tensor_parallel_size=size,
        tp_invariant=True,
        **options,
    )
    with rank_threads(load=lambda: copy_of(name)):
        return Engine(config, checkpoint)


def outputs(engine: Engine) -> dict[str, Any]:
    records = tiny.run(engine, [tiny.request(i, PARAMS) for i in range(2)])
    return {key: record.same() for key, record in records.items()}


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: weight.data.clone() for name, weight in checkpoint.weights.items()}


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("deepseek_v3", "ngram", {}),
        ("qwen2_moe", "ngram", {"quantization": "int8"}),
        ("olmo2", "mtp", {}),  # the head has a copy of the whole vocabulary
    ],
)
def test_update_and_sleep_equal_a_fresh_engine(name: str, method: str, options: dict[str, Any]) -> None:
    """No bit of the old weights is left on any rank, nor after a sleep at level 2."""
    new = copy_of(name, change=True)
    given = tensors(new)
    engine = engine_of(copy_of(name), 2, method, **options)
    before = outputs(engine)
    engine.sleep(1)
    engine.wake_up()
    engine._resume()
    assert outputs(engine) == before
    assert engine.update_weights(engine.read_weights(given.items())) == 1
    fresh = engine_of(new, 1, **options)  # drafts change nothing
    after = outputs(fresh)
    assert outputs(engine) == after != before
    engine.sleep(2)
    engine.wake_up(["weights"])
    assert engine.update_weights(engine.read_weights(given)) == 2
    engine.wake_up(["kv_cache"])
    engine._resume()
    assert outputs(engine) == after
    engine.close()


def test_part_of_the_weights() -> None:
    """Weights of one expert and of one projection are replaced; what is refused changes nothing."""
    name, layer = "qwen3_moe", "model.layers.1."
    new, mixed = copy_of(name, change=True), copy_of(name)
    names = [layer + "mlp.experts.6.up_proj.weight", layer + "self_attn.k_proj.weight"]
    names += [layer + "self_attn.o_proj.weight", "lm_head.weight"]
    engine = engine_of(copy_of(name), 2)
    with pytest.raises(LoadError, match="has no weight"):
        engine.read_weights({layer + "mlp.experts.9.up_proj.weight": torch.zeros(2)})
    with pytest.raises(LoadError, match=r"should be \[32, 32\]"):
        engine.read_weights({names[2]: torch.zeros((32, 16))})
    engine.update_weights(engine.read_weights({each: new.weights[each].data for each in names}))
    mixed.weights.update({each: new.weights[each] for each in names})
    assert outputs(engine) == outputs(engine_of(mixed, 1))
    engine.close()


@pytest.mark.control
def test_control_of_a_rank_without_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SplitWeights._parts
    monkeypatch.setattr(
        SplitWeights, "_parts", lambda self, rank, *more: {} if rank else whole(self, 0, *more)
    )
    new = copy_of("llama", change=True)
    engine = engine_of(copy_of("llama"), 2)
    engine.update_weights(engine.read_weights(tensors(new)))
    assert outputs(engine) != outputs(engine_of(new, 1))
    engine.close()
