"""Experts of gpt-oss in mxfp4 against transformers: values, logits, text, memory, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.errors import LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.families import checkpoint as families
from draftproof.models.load import load_checkpoint
from draftproof.models.registry import create_model
from draftproof.models.runner import Runner
from draftproof.models.tensor_sizes import stored_tensors
from draftproof.models.weight_formats import quantize_linears, used_formats
from draftproof.models.weights import low_bit
from draftproof.ops import resolve
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.types import Request

CPU = torch.device("cpu")
HIDDEN, INNER, NUM_EXPERTS = 64, 32, 4
NAME = "model.layers.{}.mlp.experts.{}"
OPTIONS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}


def packed(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random blocks [E, outputs, inputs / 32, 16] and exponents [E, outputs, inputs / 32]."""
    groups = (NUM_EXPERTS, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 126, groups, generator=generator, dtype=torch.uint8)


def write(folder: Path) -> Any:
    """Save a random model in bf16 with experts in mxfp4; return the same model in fp32."""
    from transformers.integrations import mxfp4  # two seconds, in each process that reads the tests

    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**OPTIONS)).eval()
    for value in model.parameters():
        value.data = value.data.bfloat16().float()
    model.save_pretrained(folder)
    file, path = folder / "model.safetensors", folder / "config.json"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    generator = torch.Generator().manual_seed(1)
    for layer, block in enumerate(model.model.layers):
        for each, outputs, inputs in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            name = NAME.format(layer, each)
            blocks, exponents = packed(outputs, inputs, generator)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
            values = mxfp4.convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
            getattr(block.mlp.experts, each).data = values
    save_file(tensors, file)
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "quantization_config": {"quant_method": "mxfp4"}}))
    return model


def test_values_are_those_of_transformers(tmp_path: Path) -> None:
    model = write(tmp_path)
    found = load_checkpoint(tmp_path)
    assert found.dtype == torch.bfloat16 and found.config.dtype == "mxfp4 (mxfp4)"
    for layer, block in enumerate(model.model.layers):
        for expert in range(NUM_EXPERTS):
            gate_up = block.mlp.experts.gate_up_proj[expert].T  # [2 I, hidden]
            want = {"gate_proj": gate_up[0::2], "up_proj": gate_up[1::2]}
            want["down_proj"] = block.mlp.experts.down_proj[expert].T
            for each, matrix in want.items():
                name = NAME.format(layer, f"{expert}.{each}.weight")
                assert found.weights[name].format == "mxfp4"
                assert torch.equal(found.tensors[name], matrix.bfloat16()), name


@torch.inference_mode()
def logits(folder: Path, tokens: Tensor, backend: str) -> Tensor:
    found = load_checkpoint(folder, dtype="float32")
    ops = resolve(backend, CPU)
    model = create_model(found.config, found.weights, ops, 64)
    runner = Runner(model, ops, torch.float32, num_pages=9, page_size=8, max_rows=len(tokens))
    table = torch.arange(1, 9, dtype=torch.int32)[None]
    rows = runner.rows(tokens, torch.arange(len(tokens)), torch.zeros_like(tokens), table)
    return runner.logits(runner.forward(rows))


def error(folder: Path, model: Any, backend: str = "cpu") -> float:
    tokens = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        want = model(tokens[None]).logits[0]
    return float((logits(folder, tokens, backend) - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_logits_are_those_of_transformers(tmp_path: Path, backend: str) -> None:
    assert error(tmp_path, write(tmp_path), backend) < 1e-4


def test_greedy_text_is_that_of_transformers(tmp_path: Path) -> None:
    model, prompt = write(tmp_path), tiny.prompt(1, 20)
    with torch.inference_mode():
        want = model.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    params = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=24)
    served = serve(tmp_path, [tiny.request(1, params, prompt_token_ids=prompt)], dtype="float32")
    assert served["1"].token_ids == want[0, 20:].tolist()


@pytest.mark.control
def test_control_other_values_of_the_codes_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path)
    monkeypatch.setattr("draftproof.ops.torch.quantized.E2M1_VALUES", low_bit.MXFP4_VALUES[::-1])
    assert error(tmp_path, model, "torch") > 1e-2


@pytest.mark.control
def test_control_gate_and_up_as_halves_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path)
    split = families.split_stacked_experts

    def wrong(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        order = torch.arange(2 * INNER).view(2, INNER).T.flatten()
        moved = {n: t[:, order] if "gate_up_proj_" in n else t for n, t in tensors.items()}
        return split(moved, config)

    monkeypatch.setattr("draftproof.models.families.checkpoint.split_stacked_experts", wrong)
    assert error(tmp_path, model) > 1e-2


def serve(
    folder: Path, requests: list[Request], drafts: dict[str, Any] | None = None, dtype: str = "auto",
    quantization: str = "auto",
) -> dict[str, tiny.Record]:  # fmt: skip
    config = EngineConfig(
        model="gpt-oss",
        device="cpu",
        warm_up=False,
        max_model_len=64,
        max_num_seqs=4,
        quantization=quantization,
        speculative=SpeculativeConfig.parse(drafts) if drafts else None,
    )
    return tiny.run(Engine(config, load_checkpoint(folder, dtype=dtype)), requests)


def test_quantization_none_unpacks_the_experts(tmp_path: Path) -> None:
    write(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    served = [
        serve(tmp_path, [tiny.request(0, params)], dtype="float32", quantization=name)["0"].same()
        for name in ("auto", "none")
    ]
    assert served[0] == served[1]  # in fp32 the unpacked weight has the bits of the stored one
    found = load_checkpoint(tmp_path)
    ops = resolve("cpu", CPU)
    assert used_formats(found.weights, ops) == "mxfp4"
    quantize_linears(found.weights, "none", ops)
    assert used_formats(found.weights, ops) == ""


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_outputs_with_drafts_equal_those_without(tmp_path: Path, quantization: str) -> None:
    write(tmp_path)
    params = SamplingParams(temperature=0.7, max_tokens=24, logprobs=2, ignore_eos=True)
    records = []
    for drafts in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        requests = [tiny.request(i, params) for i in range(3)]
        served = serve(tmp_path, requests, drafts, quantization=quantization)
        records.append([record.same() for record in served.values()])
    assert records[0] == records[1]


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_weights_stay_in_the_bytes_of_the_file(tmp_path: Path, backend: str) -> None:
    write(tmp_path)
    found, ops = load_checkpoint(tmp_path), resolve(backend, CPU)
    kinds = {kind.name: kind for kind in stored_tensors(tmp_path, found.config)}
    blocks = kinds["mlp.experts.down_proj_blocks"]
    assert blocks.memory_bytes == blocks.file_bytes == 2 * NUM_EXPERTS * HIDDEN * INNER // 2
    model = create_model(found.config, found.weights, ops, 64)
    for packed in model.layers[0].mlp.down:
        data = packed.weight if backend == "cpu" else packed.data
        assert packed.format == "mxfp4" and data.dtype == torch.uint8 and data.nbytes == HIDDEN * INNER // 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors[f"{name}_scales"].fill_(255), "scales that are not finite"),
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "weight_scales missing"),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:2].clone()}),
            "does not hold one entry an expert",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors, NAME.format(1, "down_proj"))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("swiglu_limit", 10.0), ("rope_parameters", None)])
def test_other_configurations_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(LoadError, match=key.replace("parameters", "scaling")):
        load_checkpoint(tmp_path)
