"""Head training: equality with the engine, gradients, batches, resumed runs, evaluation, exported files."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
import trained
from draftproof.errors import ConfigError, LoadError
from draftproof.models.draft_head.config import DraftHeadConfig, TargetIdentity
from draftproof.models.draft_head.formats import load_draft_head
from draftproof.models.weight_formats import dequantize_all
from draftproof.ops import Ops
from draftproof.sampling_params import SamplingParams
from draftproof.train import time_budget
from draftproof.train.data.dataset import (
    Batch,
    Batches,
    Text,
    coverage,
    frequent_ids,
    read_texts,
    write_shard,
)
from draftproof.train.evaluate import LOGIT_SCALES
from draftproof.train.export import write_head, write_speculators
from draftproof.train.model import head_module
from draftproof.train.model.attention import causal
from draftproof.train.model.grad_graph import GradientGraph
from draftproof.train.model.loss import LossWeights, Rows, unrolled_loss
from draftproof.train.model.target_forward import TargetModel
from draftproof.train.progress import ProgressReporter
from draftproof.train.time_budget import TimeEstimate, measured
from draftproof.train.trainer import Trainer, loss_weight


def is_trainable(name: str) -> bool:
    return tiny.model_config(name).has_plain_layers


def test_target_with_latent_attention_is_refused() -> None:
    made = tiny.checkpoint("deepseek_v3")
    with pytest.raises(ConfigError, match="dense target"):
        TargetModel(made.config, made.tensors, torch.device("cpu"), torch.float32, 64)


@pytest.mark.parametrize("name", [*filter(is_trainable, tiny.ARCHITECTURES)])
def test_target_model_predicts_the_tokens_of_the_engine(name: str) -> None:
    made = tiny.checkpoint(name)
    target_model = TargetModel(made.config, made.tensors, torch.device("cpu"), torch.float32, 64)
    wanted = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    record = tiny.run(tiny.engine(name), [tiny.request(3, wanted)])["3"]
    prompt = tiny.prompt(3)
    tokens = torch.tensor([[*prompt, *record.token_ids]])
    states = target_model(tokens, (0, 1))
    predicted = target_model.logits(states.hidden)[0].argmax(-1)[len(prompt) - 1 : -1]
    assert predicted.tolist() == record.token_ids
    assert states.features.shape == (1, tokens.shape[1], 2 * made.config.hidden_size)


# --- unrolled steps -------------------------------------------------------------------------------------

ATTENTIONS = ("attend_joined", "attend")


def unrolled_error(attention: str, steps: int = 4) -> float:
    """Return the largest difference to drafts that are computed row by row with stored keys."""
    made = trained.trainer(unroll=steps)
    made.module.attend = getattr(head_module, attention)
    weights = {name: weight.detach() for name, weight in made.weights.items()}
    tokens = torch.from_numpy(made.held[0].tokens.astype(np.int64))[None]
    states = made.target_model(tokens, made.config.aux_layers)
    embeds = made.target_model.embedding[torch.nn.functional.pad(tokens, (0, steps))]
    unrolled = made.module.unroll(weights, states.features, embeds, steps)
    worst = 0.0
    for row in (0, 1, 7, 20):
        chain = trained.drafted_outputs(made.config, weights, states.features[0], embeds[0], row, steps)
        for step, output in enumerate(chain):
            worst = max(worst, float((unrolled[step, 0, row] - output).abs().max()))
    return worst


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_unrolled_steps_equal_drafted_rows(attention: str) -> None:
    assert unrolled_error(attention) < 1e-5


def test_control_mask_off_by_one_changes_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(length: int, device: torch.device) -> torch.Tensor:
        mask = torch.ones(length, length, dtype=torch.bool, device=device).tril(-1)
        mask[0, 0] = True
        return mask

    monkeypatch.setattr(head_module, "visible", short)
    assert unrolled_error("attend") > 1e-3


def test_control_wrong_sum_of_exponents_changes_outputs_or_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Double the sum over the keys of step 0, then drop its gradient."""
    monkeypatch.setattr(
        head_module, "causal", lambda *given: (causal(*given)[0], causal(*given)[1] + math.log(2))
    )
    assert unrolled_error("attend_joined") > 1e-3
    assert gradient_error() > 1e-3
    monkeypatch.setattr(head_module, "causal", lambda *given: (causal(*given)[0], causal(*given)[1].detach()))
    assert unrolled_error("attend_joined") < 1e-5
    assert gradient_error() > 1e-3


def gradient_error() -> float:
    """Return the largest difference between the gradients of both attention functions."""
    generator = torch.Generator().manual_seed(0)

    def numbers(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 21, 16, generator=generator, requires_grad=True)

    q, stored, wanted = numbers(6), [(numbers(2), numbers(2)) for _ in range(3)], numbers(6).detach()
    given = [q, *(rows for pair in stored for rows in pair)]
    attends = [getattr(head_module, name) for name in ATTENTIONS]
    found = [torch.autograd.grad(attend(q, stored), given, wanted) for attend in attends]
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))


def test_both_attention_functions_have_equal_gradients() -> None:
    assert gradient_error() < 1e-5


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_control_rope_position_of_the_first_step_changes_outputs(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotation, tables = head_module.rotation, []

    def stuck(table: torch.Tensor) -> Any:
        tables.append(table)
        return rotation(tables[0])

    monkeypatch.setattr(head_module, "rotation", stuck)
    assert unrolled_error(attention) > 1e-3


# --- the loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss_weights", [LossWeights(), LossWeights(hard=0.3), LossWeights(hard=0.1, overlap=0.7)]
)
def test_loss_gradient_equals_autograd(loss_weights: LossWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with autograd over the definition, for chunks of one row, five rows and all rows."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).float()

    student, target_model, head = numbers(3, 2, 6, 5).requires_grad_(), numbers(2, 6, 5), numbers(11, 5)
    weight = numbers(3, 2, 6).abs()
    for step in range(3):
        weight[step, :, 5 - step :] = 0  # there the next text begins
    greedy_rows = torch.tensor([1.0, 0.0])  # the second text is of a temperature above 0
    expected = torch.zeros(3)
    for step in range(3):
        distribution = (target_model @ head.T).softmax(-1)
        best = torch.nn.functional.one_hot(distribution.argmax(-1), 11)
        hard = loss_weights.hard * greedy_rows[:, None, None]
        distribution = ((1 - hard) * distribution + hard * best)[:, 1 + step :]
        probs = (student[step, :, : 5 - step] @ head.T).softmax(-1)
        divergence = (distribution * (distribution.log() - probs.log())).sum(-1)
        divergence = divergence + loss_weights.overlap * (1 - torch.minimum(distribution, probs).sum(-1))
        expected[step] = (weight[step, :, : 5 - step] * divergence).sum()
    expected.sum().backward()
    gradient = student.grad
    flat = target_model.flatten(0, 1), head, weight.flatten(1), greedy_rows.repeat_interleave(6)
    for size in (1, 4 * 11 * 5, 1 << 29):
        monkeypatch.setattr("draftproof.train.model.loss.CHUNK_BYTES", size)
        again = student.detach().requires_grad_()
        total, parts = unrolled_loss(again.flatten(1, 2), *flat, Rows.from_weights(flat[2]), loss_weights)
        total.backward()
        torch.testing.assert_close(parts, expected.detach())
        torch.testing.assert_close(again.grad, gradient)


# --- text -----------------------------------------------------------------------------------------------


def test_shards_read_back_equal(tmp_path: Path) -> None:
    some = trained.texts()[:5]
    write_shard(tmp_path, 0, some[:3], 97)
    write_shard(tmp_path, 1, some[3:], 70000)
    for old, new in zip(some, read_texts(tmp_path), strict=True):
        assert old.tokens.tolist() == new.tokens.tolist()
        facts = (old.prompt_length, old.temperature, old.seed)
        assert facts == (new.prompt_length, new.temperature, new.seed)
    with pytest.raises(LoadError, match="run the phase `generate` first"):
        read_texts(tmp_path / "nothing")


def test_epoch_holds_every_text_once() -> None:
    every = [Text(np.arange(3 + i % 90), 1, 0.0, i) for i in range(300)]
    batches = Batches(every, 512, 80, seed=4)
    for number in (0, 1):
        groups = batches.epoch(number)
        assert sorted(i for group in groups for i in group) == list(range(300))
        for group in groups:
            width = -(-max(min(len(every[i].tokens), 80) for i in group) // 64) * 64
            assert width * len(group) <= 512
    assert batches.epoch(0) != batches.epoch(1)
    resumed, first = islice(batches.from_step(70), 60), islice(batches.from_step(0), 70, 130)
    for ahead, whole in zip(resumed, first, strict=True):
        assert ahead.tokens.tolist() == whole.tokens.tolist()


def test_frequent_ids_count_outputs_only() -> None:
    some = [Text(np.asarray([9, 9, 9, 5, 5, 3]), 3, 0.0, 0), Text(np.asarray([8, 5, 3, 7]), 1, 0.0, 0)]
    assert frequent_ids(some, 12, 3).tolist() == [3, 5, 7]
    assert frequent_ids(some, 12, 5).tolist() == [0, 1, 3, 5, 7]
    assert coverage(some, np.asarray([3, 7]), 12) == 3 / 6


# --- training -------------------------------------------------------------------------------------------


def written(made: Any, folder: Path) -> bytes:
    write_head(folder, made.config, made.weights, made.d2t)
    return (folder / "model.safetensors").read_bytes()


def learn_until(made: Trainer, step: int) -> None:
    for batch in made.batches.from_step(made.step):
        if made.step == step:
            break
        made.learn(batch)


def test_training_improves_acceptance_and_repeats_with_its_seed(tmp_path: Path) -> None:
    plan = {"steps": 30, "optimizer": "muon"}
    one = trained.trainer(**plan, eval_every=10)
    assert one.run(tmp_path / "one")
    points = [point["acceptance"] for point in one.curve]
    assert [point["step"] for point in one.curve] == [0, 10, 20, 30]
    assert points[-1]["greedy"]["length"] > points[0]["greedy"]["length"] + 0.15
    assert points[-1]["coupled"]["length"] > points[-1]["argmax"]["length"] + 0.25
    losses = [point["loss"] for point in one.curve[1:]]
    assert all(last < first for first, last in zip(losses[0], losses[-1], strict=True))
    for stop in (7, 21, 30):  # again, interrupted twice
        part = trained.trainer(**plan, eval_every=10)
        assert part.resume(tmp_path / "two") == (stop > 7)
        learn_until(part, stop)
        part.save(tmp_path / "two")
    assert written(part, tmp_path / "head two") == written(one, tmp_path / "head one")
    short = [trained.trainer(**plan, seed=seed) for seed in (0, 1)]
    for other in short:
        learn_until(other, 2)
    assert written(short[0], tmp_path / "head 0") != written(short[1], tmp_path / "head 1")


def test_loss_weight_of_output_prompt_and_padding_rows() -> None:
    made = trained.trainer(unroll=2, decay=0.5, prompt_weight=0.25)
    batch = Batch.of([Text(np.arange(7), 4, 0.0, 0), Text(np.arange(5), 1, 1.0, 0)], 64, multiple=8)
    weight, greedy_rows = loss_weight(batch, made.plan, made.step)
    assert greedy_rows.tolist() == [1.0] * 8 + [0.0] * 8
    total = 3 * 0.25 + 2 + 3
    first = torch.tensor([[0.25, 0.25, 0.25, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(weight[0] * total, first.flatten())
    second = torch.tensor([[0.25, 0.25, 0.25, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(weight[1] * total, 0.5 * second.flatten())
    made = trained.trainer(unroll=2, decay=0.5, prompt_weight=0.25, prompt_rows=3)
    used = []
    for made.step in range(3):  # every row of a prompt once, with three times the weight
        used.append(loss_weight(batch, made.plan, made.step)[0][0])
        rows = Rows.from_weights(loss_weight(batch, made.plan, made.step)[0])
        assert rows.chosen.tolist() == [made.step and 3 - made.step, 3, 4, 8, 9, 10]
        assert rows.target_rows.tolist() == sorted({p + j for p in rows.chosen.tolist() for j in (1, 2)})
        assert rows.target_rows[rows.target_index].tolist() == [(rows.chosen + j).tolist() for j in (1, 2)]
    assert torch.equal(torch.stack(used).sum(0) != 0, weight[0] != 0)


def replayed(made: Trainer) -> Trainer:
    """Let a trainer compute gradients as on a device with graphs, with padded batches and rows."""

    class ReplayRuntime:
        asynchronous = True
        send, graph = made.ops.runtime.send, made.ops.runtime.graph

    class Replaying:
        runtime, device = ReplayRuntime(), made.device

    weights = list(made.weights.values())
    made.gradients = GradientGraph(made._gradients, weights, made.plan.unroll, cast(Ops, Replaying()))
    return made


@pytest.mark.parametrize("keep", [0, 1])
def test_padding_changes_no_gradient(keep: int) -> None:
    plain, other = trained.trainer(keep=keep), replayed(trained.trainer(keep=keep))
    shapes = set()
    for number, group in enumerate(plain.batches.epoch(0)[:6]):
        batch = plain.batches._batch(group[: 8 - number])
        batch_tensors, wide = plain._batch_tensors(batch), other._batch_tensors(batch)
        shapes.add(tuple(part.shape for part in wide))
        assert len(wide.tokens) == 512 // batch.tokens.shape[1]
        assert len(wide.target_rows) == wide.tokens.numel()
        assert len(wide.chosen) % (wide.tokens.numel() // 8) == 0
        assert len(wide.chosen) > len(batch_tensors.chosen)
        (ours, losses), (theirs, same) = plain.gradients(batch_tensors, True), other.gradients(wide, False)
        torch.testing.assert_close(losses, same)
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, two)
        for made in (plain, other):
            made.step += 1
    assert len(shapes) > 1


def test_kept_target_states_equal_computed_ones_and_survive_a_resume(tmp_path: Path) -> None:
    plain, kept = trained.trainer(), trained.trainer(keep=1)
    for batch, _ in zip(plain.batches.from_step(0), range(4), strict=False):
        tokens = torch.from_numpy(batch.tokens)
        ours, theirs = (one.target_states(tokens, one.target_states.places(batch)) for one in (plain, kept))
        for line, length in enumerate(batch.lengths.tolist()):
            for name in ("features", "hidden"):
                one, other = (getattr(states, name)[line, :length] for states in (ours, theirs))
                torch.testing.assert_close(one, other)
    assert kept.run(tmp_path / "whole")
    for stop in (5, 12):
        part = trained.trainer(keep=1)
        part.resume(tmp_path / "part")
        learn_until(part, stop)
        part.save(tmp_path / "part")
    whole, cut = (tmp_path / name / "head" / "model.safetensors" for name in ("whole", "part"))
    assert whole.read_bytes() == cut.read_bytes()


def test_training_continues_from_an_existing_head(tmp_path: Path) -> None:
    first = trained.trainer()
    first.run(tmp_path)
    folder = str(tmp_path / "head")
    again = trained.trainer(begin=folder)
    assert torch.equal(again.d2t, first.d2t)
    for name, weight in first.rounded().items():
        assert torch.equal(again.weights[name].detach(), weight), name
    assert again.accepted(again.held) == first.accepted(first.held)
    wider = trained.trainer(begin=folder, intermediate_size=first.config.intermediate_size + 8, new_ids=1)
    assert wider.accepted(wider.held) == first.accepted(first.held)  # added columns are zero
    assert trained.trainer(begin=folder, draft_vocab=70).d2t.shape == (70,)
    with pytest.raises(ConfigError, match="cannot continue from this head: intermediate_size is"):
        trained.trainer(begin=folder, intermediate_size=40)


def test_time_limit_leaves_a_state_to_resume_from(tmp_path: Path) -> None:
    made = trained.trainer()
    assert not made.run(tmp_path, stop_at=0.0)
    again = trained.trainer()
    assert again.resume(tmp_path) and again.step == 0 and len(again.curve) == 1
    with pytest.raises(LoadError, match="for another head"):
        trained.trainer(draft_vocab=60).resume(tmp_path)


def test_acceptance_is_k_plus_one_if_all_drafts_are_right_and_one_if_none_is() -> None:
    made = trained.trainer(drafts=3)
    text = made.held[0]
    tokens = torch.from_numpy(text.tokens.astype(np.int64))
    left = len(tokens) - 1 - text.prompt_length  # the first token of an output has no draft

    def right(logits: Any, seeds: Any, positions: torch.Tensor) -> torch.Tensor:
        return tokens[positions + text.prompt_length]

    weights = made.rounded()
    rules = {"right": right, "wrong": lambda *a: right(*a) + 1}
    found = made.evaluator.measure_acceptance(weights, [text], 64, rules)
    best, worst = found["right"], found["wrong"]
    assert best.steps == -(-left // 4) and best.length == pytest.approx(left / best.steps)
    assert best.rates[0] == 1.0
    assert worst.steps == left and worst.length == 1.0 and set(worst.rates) == {0.0}


def test_scale_logits_sharpens_flat_logits_only_and_keeps_greedy_acceptance() -> None:
    made = trained.trainer(steps=25, drafts=3)
    learn_until(made, 25)
    norm = made.weights["norm.weight"].data
    trained_norm = norm.clone()
    made.held = list(trained.texts())
    for factor in (0.6, 3.0):
        norm.copy_(trained_norm * factor)
        before, kept = made.accepted(made.held), norm.clone()
        by_scale = made.evaluator.acceptance_by_logit_scale(made.rounded(), made.held, 64)
        assert list(by_scale) == list(LOGIT_SCALES) and by_scale[1.0] == before["coupled"]
        best = max(by_scale, key=lambda scale: by_scale[scale].length)
        assert (best > 1) == (factor < 1)
        made.scale_logits()
        assert torch.equal(norm, kept * best)
        after = made.accepted(made.held)
        assert after["coupled"].length == pytest.approx(by_scale[best].length, rel=0.03)  # bf16 rounds
        assert after["greedy"].length == pytest.approx(before["greedy"].length, rel=0.03)
    for options in ({"scale_logits": 0}, {"norm_output": 1}):
        other = trained.trainer(**options)
        kept = other.weights["norm.weight"].detach().clone()
        other.scale_logits()
        assert torch.equal(other.weights["norm.weight"], kept)


@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"feature_norm": "each", "norm_output": 1}])
def test_engine_takes_the_steps_that_evaluation_counted(tmp_path: Path, options: dict[str, Any]) -> None:
    made = trained.trainer(steps=25, drafts=3, **options)
    learn_until(made, 25)
    write_head(tmp_path, made.config, made.weights, made.d2t, made.plan.bits)
    expected = made.accepted(made.held)
    spec = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    for name, temperature in (("greedy", 0.0), ("coupled", 1.0)):
        texts = [text for text in made.held if text.temperature == temperature]
        requests = [
            tiny.request(
                i,
                SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True),
                prompt_token_ids=text.tokens[: text.prompt_length].tolist(),
                seed=text.seed,
            )
            for i, text in enumerate(texts)
        ]
        records = tiny.run(tiny.engine("llama", speculative=spec), requests)
        steps = 0
        for request, text in zip(requests, texts, strict=True):
            record = records[request.id]
            assert record.token_ids == text.tokens[text.prompt_length :].tolist()
            steps += len([step for step in record.steps if step.token_ids]) - 1  # the first has no drafts
        assert steps == expected[name].steps and expected[name].length > 1.1


# --- files ----------------------------------------------------------------------------------------------


def test_int8_head_is_half_as_large_and_reads_back_as_evaluated(tmp_path: Path) -> None:
    made = trained.trainer(bits=8)
    made.run(tmp_path)
    write_head(tmp_path / "wide", made.config, made.weights, made.d2t)
    folders = tmp_path / "head", tmp_path / "wide"
    narrow, wide = (load_file(folder / "model.safetensors") for folder in folders)
    size, full = (sum(t.nbytes for name, t in some.items() if name != "d2t") for some in (narrow, wide))
    assert 0.5 * full < size < 0.6 * full
    target = made.config.target
    for name, weight in dequantize_all(load_draft_head(folders[0], target)[1]).items():
        if name != "d2t":
            assert weight.dtype == torch.bfloat16 and torch.equal(weight.float(), made.rounded()[name])
            kept = made.weights[name].detach()
            most = 1 if kept.dim() == 1 else kept.abs().amax(1, keepdim=True) / 127
            assert ((weight - kept).abs() <= 0.51 * most + kept.abs() / 256).all()
    assert torch.equal(narrow["norm.weight"], wide["norm.weight"])
    del narrow["fc.weight.scale"]
    save_file(narrow, folders[0] / "model.safetensors")
    with pytest.raises(LoadError, match=r"fc\.weight is int8, but fc\.weight\.scale"):
        load_draft_head(folders[0], target)
    with pytest.raises(ConfigError, match="bits is 8 or 16, got 4"):
        trained.plan(bits=4)


def export_speculators(made: Trainer, folder: Path, verifier: str) -> None:
    given = made.config, made.weights, made.d2t, made.target_model.config, made.head
    write_speculators(folder, *given, verifier=verifier, drafts=3)


def test_both_formats_hold_equal_weights(tmp_path: Path) -> None:
    made = trained.trainer()
    write_head(tmp_path / "ours", made.config, made.weights, made.d2t)
    export_speculators(made, tmp_path / "theirs", "some/model")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert set(ours) == {*made.weights, "d2t"} and set(theirs) == {*ours, "t2d", "lm_head.weight"}
    for name in made.weights:
        assert torch.equal(ours[name], theirs[name])
    ids = theirs["d2t"] + torch.arange(80)
    assert torch.equal(ids, ours["d2t"]) and torch.equal(theirs["t2d"].nonzero()[:, 0], ids)
    assert torch.equal(theirs["lm_head.weight"], made.target_model.head[ids].bfloat16())
    raw = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert DraftHeadConfig.from_json(raw) == made.config
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert raw["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in made.config.aux_layers]
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/model"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("options", [{}, {"feature_norm": "each", "norm_output": 1}])
def test_speculators_class_gives_the_logits_of_training(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("speculators")
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel

    made = trained.trainer(unroll=3, **options)
    trained.write_model(tmp_path)
    head = tmp_path / "head"
    export_speculators(made, head, str(tmp_path))
    config = SpeculatorModelConfig.from_pretrained(str(head))
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel.from_pretrained(str(head), config=config, dtype=torch.float32).eval()
    with torch.no_grad():  # the embedding is the verifier's, and not in the file
        theirs.embed_tokens.weight.copy_(made.target_model.embedding)
    tokens = torch.from_numpy(made.held[0].tokens.astype(np.int64))[None]
    states = made.target_model(tokens, made.config.aux_layers)
    logits: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out))
    with torch.no_grad():
        following = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        theirs(states.features, following, torch.zeros_like(tokens), ttt_steps=3)
        weights = made.rounded()
        embeds = made.target_model.embedding[torch.nn.functional.pad(tokens, (0, 3))]
        outputs = made.module.unroll(weights, states.features, embeds, 3)
        ours = made.module.normed(weights, outputs) @ made.head.bfloat16().float().T
    for step in range(3):
        rows = tokens.shape[1] - 1 - step  # rows whose token exists
        torch.testing.assert_close(ours[step, :, :rows], logits[step][:, :rows], atol=1e-4, rtol=1e-4)


def test_target_identity_depends_on_the_model_and_not_on_the_dtype() -> None:
    one, other = (tiny.checkpoint(name) for name in ("llama", "qwen2"))
    target = trained.trainer().config.target
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {name: tensor.to(dtype) for name, tensor in one.tensors.items()}
        assert TargetIdentity.from_weights(one.config, tensors) == target
    assert TargetIdentity.from_weights(other.config, other.tensors) != target


# --- time budget ----------------------------------------------------------------------------------------


def test_steps_are_the_largest_number_that_fits_the_time() -> None:
    found = TimeEstimate(update=0.1, point=2.0, saving=0.2, once=30.0)
    steps = found.steps(300.0, 250)
    assert steps == 2444

    def whole(count: int) -> float:
        return count * found.update + found.overhead(count, 300.0, 250)

    assert whole(steps) <= 300 < whole(steps + 1)
    assert found.steps(20.0, 250) == 1


@pytest.mark.parametrize(
    ("options", "once"),
    [({"scale_logits": 0}, 0.0), ({"scale_logits": 1}, 2.0), ({"scale_logits": 0, "keep": 1}, 100.0)],
)
def test_measured_estimate_scales_the_timed_part_to_the_whole_text(
    options: dict[str, int], once: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let every timed part take one second."""

    def timed(trainer: Trainer, work: Any) -> float:
        work()
        return 1.0

    monkeypatch.setattr(time_budget, "_timed", timed)
    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(time_budget, "GROUP_TEXTS", 2)
    monkeypatch.setattr(time_budget, "TIMED_UPDATES", 2)
    made = trained.trainer(**options)
    found = measured(made, 0.0, 100 * int(made.batches.begins[-1]))
    assert found == TimeEstimate(update=1 / time_budget.TIMED_UPDATES, point=1.0, saving=1.0, once=once)


def test_held_out_texts_with_prompts_beyond_max_len_are_left_out() -> None:
    every = trained.texts()
    long = Text(np.arange(90, dtype=np.uint16), 70, 0.0, 1)
    held = [long, *every[:8], Text(np.arange(70, dtype=np.uint16), 64, 1.0, 1)]
    device = torch.device("cpu")
    made = Trainer(trained.plan(), tiny.checkpoint("llama"), every[8:], held, device, ProgressReporter())
    assert made.held == list(every[:8])
    assert set(made.accepted(made.held)) == {"greedy", "coupled", "argmax"}
