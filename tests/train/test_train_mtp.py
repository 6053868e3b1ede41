"""Training of an MTP layer: the engine drafts with it out of a copy of the model's checkpoint."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import heads
import tiny
import trained
from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.engine.engine import Engine
from draftproof.errors import ConfigError
from draftproof.models.draft_head.formats import read_draft_head
from draftproof.models.load import load_checkpoint
from draftproof.sampling_params import SamplingParams
from draftproof.train.checkpoint_copy import MTP_FILE, write_checkpoint
from draftproof.train.model.head_module import HeadModule
from draftproof.train.trainer import Trainer

# with plain layers, norms of q and k, and biases beside rotary pairs
ARCHITECTURES = ("llama", "qwen3", "ernie4_5")


def trained_layer(arch: str, folder: Path, steps: int = 25, optimizer: str = "adamw") -> Trainer:
    """Train an MTP layer for a few updates and write the copy of the checkpoint."""
    made = trained.trainer(arch, kind="mtp", draft_vocab=0, steps=steps, drafts=3, optimizer=optimizer)
    for batch in islice(made.batches.from_step(0), steps):
        made.learn(batch)
    checkpoint = tiny.checkpoint(arch)
    (folder / "source").mkdir()
    heads.write_model(folder / "source", checkpoint.config, checkpoint.tensors)
    write_checkpoint(folder / "model", load_checkpoint(folder / "source"), made.weights)
    return made


def steps_in_engine(made: Trainer, folder: Path, temperature: float) -> int:
    """Return the steps with drafts that the engine takes for the held-out texts, which must not change."""
    spec = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    sizes = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 8, "warm_up": False}
    config = EngineConfig(model=str(folder), speculative=SpeculativeConfig.parse(spec), **sizes)
    texts = [text for text in made.held if text.temperature == temperature]
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    requests = [
        tiny.request(i, params, prompt_token_ids=t.tokens[: t.prompt_length].tolist(), seed=t.seed)
        for i, t in enumerate(texts)
    ]
    records = tiny.run(Engine(config, load_checkpoint(folder)), requests)
    steps = 0
    for request, text in zip(requests, texts, strict=True):
        assert records[request.id].token_ids == text.tokens[text.prompt_length :].tolist()
        steps += len([step for step in records[request.id].steps if step.token_ids]) - 1
    return steps


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_engine_takes_the_steps_that_evaluation_counted(arch: str, tmp_path: Path) -> None:
    made = trained_layer(arch, tmp_path)
    expected = made.accepted(made.held)
    for name, temperature in (("greedy", 0.0), ("coupled", 1.0)):
        assert steps_in_engine(made, tmp_path / "model", temperature) == expected[name].steps
        assert expected[name].length > 1.1


@pytest.mark.control
def test_control_defect_in_the_trained_pass_changes_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trained_layer("llama", tmp_path)
    inputs = HeadModule._inputs
    monkeypatch.setattr(
        HeadModule, "_inputs", lambda self, weights, feature, token: inputs(self, weights, token, feature)
    )
    assert steps_in_engine(made, tmp_path / "model", 0.0) != made.accepted(made.held)["greedy"].steps


def test_copy_holds_the_model_unchanged_and_is_written_again(tmp_path: Path) -> None:
    made = trained_layer("llama", tmp_path, steps=1, optimizer="muon")
    source, copy = load_checkpoint(tmp_path / "source"), load_checkpoint(tmp_path / "model")
    assert all(torch.equal(copy.tensors[name], tensor) for name, tensor in source.tensors.items())
    names = load_file(tmp_path / "model" / MTP_FILE)
    assert {"model.layers.2.enorm.weight", "model.layers.2.shared_head.norm.weight"} <= names.keys()
    with torch.no_grad():
        made.weights["enorm.weight"].fill_(2.0)
    write_checkpoint(tmp_path / "model", source, made.weights)
    _, weights = read_draft_head(tmp_path / "model", 2)
    assert bool((weights["enorm.weight"].data == 2).all())
    every = trained.texts("llama")
    with pytest.raises(ConfigError, match="has an MTP layer"):
        Trainer(made.plan, copy, every[8:], every[:8], torch.device("cpu"), made.reporter)


def test_loss_over_some_ids_trains_a_layer_that_drafts_all() -> None:
    made = trained.trainer(kind="mtp", draft_vocab=60)
    assert len(made.d2t) == 60 and made.config.draft_vocab_size == tiny.VOCAB
    before = made.accepted(made.held)["greedy"].length
    for batch in islice(made.batches.from_step(0), 12):
        made.learn(batch)
    assert made.accepted(made.held)["greedy"].length > before
    assert np.array_equal(made.evaluator.d2t.numpy(), np.arange(tiny.VOCAB))


@pytest.mark.parametrize("option", [{"bits": 8}, {"aux_layers": (0, 1)}, {"intermediate_size": 64}])
def test_options_of_other_heads_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(option))} is an option of --kind eagle3"):
        trained.plan(kind="mtp", **option)


def test_layers_that_training_does_not_compute_are_refused() -> None:
    with pytest.raises(ConfigError, match="an MTP layer for MistralForCausalLM cannot be trained"):
        trained.trainer("mistral", kind="mtp")
