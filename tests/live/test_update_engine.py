"""Weight updates of an engine: outputs after an update are those of a fresh engine, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import heads
import tiny
from checkpoint_copies import copy_of
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.engine.live.operations import Operation
from draftproof.errors import ConfigError, EngineDownError, LoadError
from draftproof.models.load import Checkpoint
from draftproof.models.rope import qk_to_pairs
from draftproof.models.weight_formats import WeightPacker
from draftproof.models.weights.packed_tree import tensors_in
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, logprobs=1, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
ONE_OF_EACH = ("llama", "ernie4_5", "smollm2")  # untied, interleaved with biases, tied


def engine_of(checkpoint: Checkpoint, speculative: dict[str, Any] | None = None, **options: Any) -> Engine:
    spec = None if speculative is None else SpeculativeConfig.parse(speculative)
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "kv_cache_tokens": 128, "max_num_batched_tokens": 32}
    values = {**sizes, "device": "cpu", "warm_up": False, "debug": True, **options}
    return Engine(EngineConfig(model="tiny", speculative=spec, **values), checkpoint)


def outputs(engine: Engine, params: SamplingParams = PARAMS, count: int = 2) -> dict[str, Any]:
    records = tiny.run(engine, [tiny.request(i, params) for i in range(count)])
    return {key: record.same() for key, record in records.items()}


def stored(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the tensors under the names and in the order of rows of a safetensors checkpoint."""
    config = checkpoint.config
    tensors = {name: weight.data.clone() for name, weight in checkpoint.weights.items()}
    if not config.reorders_qk:
        return tensors
    return {name: qk_to_pairs(name, tensor, config) for name, tensor in tensors.items()}


def update(engine: Engine, weights: Any = (), **more: Any) -> int:
    """Update an engine without requests."""
    return engine.update_weights(engine.read_weights(weights, **more))


@pytest.mark.parametrize(
    ("name", "backend"), [(n, "torch") for n in tiny.ARCHITECTURES] + [(n, "cpu") for n in ONE_OF_EACH]
)
def test_every_family_equals_a_fresh_engine(name: str, backend: str) -> None:
    """No bit of the old weights is left in any part of any family."""
    new = copy_of(name, change=True)
    given = stored(new)
    engine = engine_of(copy_of(name), NGRAM, backend=backend)
    before = outputs(engine)
    assert update(engine, given.items()) == 1
    assert outputs(engine) == outputs(engine_of(new, backend=backend)) != before


def test_unrecorded_part_is_seen_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a part that is packed without a record keeps its old values."""
    monkeypatch.setattr(WeightPacker, "tensor", lambda self, name: self.on_device(self.weights.pop(name)))
    engine, new = engine_of(copy_of("llama"), backend="torch"), copy_of("llama", change=True)
    with pytest.raises(LoadError, match="the model has no weight"):
        update(engine, stored(new))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_part_of_a_packed_weight(backend: str) -> None:
    """One of q, k and v is replaced, and the others keep their bits."""
    new, mixed = copy_of("qwen2", change=True), copy_of("qwen2")
    names = ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    names += ["model.layers.0.self_attn.v_proj.bias"]
    engine = engine_of(copy_of("qwen2"), backend=backend)
    update(engine, [(name, new.weights[name].data) for name in names])
    mixed.weights.update({name: new.weights[name] for name in names})
    assert outputs(engine) == outputs(engine_of(mixed, backend=backend))


def test_quantised_on_load() -> None:
    """Weights that are quantised on load are quantised in an update, whole groups at a time."""
    new = copy_of("llama", change=True)
    given = stored(new)
    engine = engine_of(copy_of("llama"), quantization="int8", backend="cpu")
    before = outputs(engine)
    one = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(LoadError, match="cannot be replaced"):
        update(engine, {one: given[one]})
    assert outputs(engine) == before
    update(engine, given)
    assert outputs(engine) == outputs(engine_of(new, quantization="int8", backend="cpu"))


def test_refused_updates_change_nothing() -> None:
    """An update with one wrong entry, at its end, leaves every weight and the version as they were."""
    engine, given = engine_of(copy_of("llama"), backend="torch"), stored(copy_of("llama", change=True))
    before = outputs(engine)
    table = given["model.embed_tokens.weight"]
    for wrong, reason in (
        ({"model.layers.7.mlp.up_proj.weight": table}, "has no weight"),
        ({"model.norm.weight": table}, r"is \[97, 32\] but should be \[32\]"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int64)}, "give floats"),
        ({}, "holds no weights"),
    ):
        with pytest.raises(LoadError, match=reason):
            update(engine, {**given, **wrong} if wrong else {})
    with pytest.raises(LoadError, match="given twice"):
        update(engine, [*given.items(), ("model.norm.weight", table[0])])
    with pytest.raises(LoadError, match="makes no drafts"):
        update(engine, draft_weights=given)
    with pytest.raises(LoadError, match="is not above 0"):
        update(engine, given, version=0)
    assert engine.weights_version == 0 and outputs(engine) == before


@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["plain", "ngram"])
def test_requests_in_flight_continue_with_the_new_weights(speculative: Any) -> None:
    """Tokens before the swap are those of the old weights; later ones those of a fresh engine after them."""
    old, new = copy_of("llama"), copy_of("llama", change=True)
    given = stored(new)
    engine = engine_of(copy_of("llama"), speculative, overlap=True)
    pool, swapped = engine.loop.scheduler.pages, {}
    records: dict[str, list[Any]] = {str(i): [] for i in range(3)}

    def swap(run: Any) -> int:
        swapped.update({key: len(tokens) for key, tokens in records.items()})
        return int(run())

    for i in range(3):  # the third one waits
        engine.add(tiny.request(i, GREEDY))
    step, replies = 0, list[Any]()
    while engine.has_work:
        if step == 7:
            run = partial(swap, engine.prepare("update_weights", {"weights": given, "version": 40}))
            engine.operate(Operation(run, "keep", replies.append))
        for out in engine.step():
            rows = [(row.token_ids, row.logprobs) for row in out.logprobs or []]
            records[out.request_id] += zip(out.token_ids, rows, strict=True)
        step += 1
    assert replies == [40] and engine.weights_version == 40
    assert 0 < swapped["0"] < GREEDY.max_tokens and swapped["2"] == 0
    plain, fresh = engine_of(old), engine_of(new)
    for i in range(3):
        made, cut = records[str(i)], swapped[str(i)]
        assert len(made) == GREEDY.max_tokens
        begin = [token for token, _ in made[:cut]]
        want = tiny.run(plain, [tiny.request(i, GREEDY)])[str(i)]
        assert begin == want.token_ids[:cut]
        ids = [*tiny.prompt(i), *begin]
        rest = replace(GREEDY, max_tokens=GREEDY.max_tokens - cut)
        after = tiny.run(fresh, [tiny.request(i, rest, prompt_token_ids=ids)])[str(i)]
        assert [token for token, _ in made[cut:]] == after.token_ids
        assert [row for _, row in made[cut:]] == [(row.token_ids, row.logprobs) for row in after.logprobs]
    pool.check()


def test_old_kv_is_not_reused_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with a prefix cache that survives the update, outputs are wrong."""
    new = copy_of("llama", change=True)
    given = stored(new)
    long = [tiny.request(0, GREEDY, length=30)]
    want = tiny.run(engine_of(new), long)["0"].same()
    for clears in (True, False):
        engine = engine_of(copy_of("llama"))
        tiny.run(engine, long)
        if not clears:
            monkeypatch.setattr(engine.loop.scheduler.pages, "clear", lambda: None)
        update(engine, given)
        assert (tiny.run(engine, long)["0"].same() == want) == clears


def test_mode_wait_finishes_requests_first() -> None:
    """Requests that have begun end with the old weights; one that waits begins with the new ones."""
    old, new = copy_of("llama"), copy_of("llama", change=True)
    given, engine = stored(new), engine_of(copy_of("llama"), NGRAM, max_num_seqs=1)
    requests = [tiny.request(i, GREEDY) for i in range(2)]
    replies: list[Any] = []

    def begin(step: int) -> None:
        if step == 3:
            run = engine.prepare("update_weights", {"weights": given})
            engine.operate(Operation(run, "wait", replies.append))

    got = tiny.run(engine, requests, each_step=begin)
    assert replies == [1]
    assert got["0"].same() == tiny.run(engine_of(old), requests)["0"].same()
    assert got["1"].same() == tiny.run(engine_of(new), requests)["1"].same()


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_heads_are_updated_the_same_way(method: str) -> None:
    """A head after an update has the packed weights of a fresh one; outputs do not depend on it."""

    def speculative(where: str) -> dict[str, Any]:
        return {"method": method, "num_speculative_tokens": 2, "model": where, "adaptive": False}

    config = heads.head_config(method)
    other = heads.head_tensors(config, seed=6)
    if "d2t" in other:
        other["d2t"] = heads.head_tensors(config)["d2t"]
    folder = heads.save_head(f"{method}-other", config, other)
    engine = engine_of(copy_of("llama"), speculative(heads.head(method)))
    fresh = engine_of(copy_of("llama"), speculative(folder))
    before, want = outputs(engine), [t.clone() for t in tensors_in(fresh.loop.proposer.entries)]
    assert update(engine, draft_weights=other) == 1
    got = list(tensors_in(engine.loop.proposer.entries))
    assert len(got) == len(want) > 4 and all(map(torch.equal, got, want))
    assert update(engine, draft_weights=folder) == 2
    assert outputs(engine) == before
    with pytest.raises(LoadError, match="has no weight"):
        update(engine, draft_weights={"layers.9.mlp.up_proj.weight": torch.ones(48, 32)})


def test_pools_of_earlier_outputs_are_emptied() -> None:
    """Drafts from outputs of the old weights are not offered any more."""
    engine = engine_of(copy_of("llama"), {"method": "suffix", "num_speculative_tokens": 3})
    outputs(engine, GREEDY)
    pool = engine.loop.proposer.pool
    assert (pool.owner != -1).any()
    update(engine, stored(copy_of("llama", change=True)))
    assert (pool.owner == -1).all() and not pool._lines
    outputs(engine, GREEDY)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["plain", "ngram"])
def test_sleep_and_wake_up_keep_the_bits(level: int, speculative: Any) -> None:
    """Requests that a sleep interrupts continue with the same bits, and so do later ones."""
    made = copy_of("llama")
    engine = engine_of(made, speculative, enable_sleep_mode=True, overlap=True, backend="torch")
    engine._live._source = heads.save_model("llama-asleep", made.config, stored(copy_of("llama")))
    requests = [tiny.request(i, GREEDY) for i in range(2)]
    want = {
        key: one.same()
        for key, one in tiny.run(engine_of(copy_of("llama"), backend="torch"), requests).items()
    }
    weights, caches = list(tensors_in(engine.runner.model.entries)), engine.runner.caches
    addresses = [tensor.data_ptr() for tensor in (*weights, *caches)]
    replies: list[Any] = []

    def sleep(step: int) -> None:
        if step == 5:
            engine.operate(Operation(engine.prepare("sleep", {"level": level}), "keep", replies.append))
        if replies and engine.sleep_level:
            assert len(engine.step()) == 0
            with torch.inference_mode():  # whatever the memory holds afterwards
                for tensor in (*caches, *(weights if level == 2 else ())):
                    tensor.fill_(7.0)
            engine.operate(Operation(engine.prepare("wake_up", {"tags": None}), "keep", replies.append))

    got = tiny.run(engine, requests, each_step=sleep)
    assert replies == [None, None] and engine.sleep_level == 0
    assert {key: one.same() for key, one in got.items()} == want
    assert [tensor.data_ptr() for tensor in (*weights, *caches)] == addresses


def test_sleep_is_refused_without_its_option() -> None:
    """Sleep and wake-up need enable_sleep_mode; requests are refused while the engine sleeps."""
    engine = engine_of(copy_of("llama"), backend="torch")
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        engine.sleep()
    engine = engine_of(copy_of("llama"), backend="torch", enable_sleep_mode=True)
    given = stored(copy_of("llama", change=True))
    update(engine, given)
    engine.sleep(2)
    with pytest.raises(EngineDownError, match="sleeps"):
        engine.add(tiny.request(0, PARAMS))
    with pytest.raises(EngineDownError, match="sleeps"):
        update(engine, given)
    with pytest.raises(ConfigError, match="of version 1"):  # the checkpoint does not hold these weights
        engine.wake_up()
    with pytest.raises(ConfigError, match="must hold all of them"):
        update(engine, {"model.norm.weight": given["model.norm.weight"]})
    assert update(engine, given, version=9) == 9
    engine.wake_up(["kv_cache"])
    engine._resume()
    assert outputs(engine) == outputs(engine_of(copy_of("llama", change=True), backend="torch"))
