"""MTP layers inside the target's own folder: kept out of the target, offered to method `mtp`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import heads
import tiny
from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.engine.engine import Engine
from draftproof.errors import LoadError
from draftproof.models.draft_head.formats import read_draft_head
from draftproof.models.load import load_checkpoint
from draftproof.models.weight_formats import dequantize_all
from draftproof.sampling_params import SamplingParams

ARCH = "qwen3"  # the layers of an MTP head with norms of q and k
QWEN = {"layers.0.": "mtp.layers.0.", "eh_proj.": "mtp.fc.", "norm.": "mtp.norm."}
QWEN |= {"hnorm.": "mtp.pre_fc_norm_hidden.", "enorm.": "mtp.pre_fc_norm_embedding."}
MIMO = {"layers.0.": "", "eh_proj.": "input_proj.", "norm.": "final_layernorm."}
MIMO |= {"hnorm.": "hidden_layernorm.", "enorm.": "token_layernorm."}
MIMO = {ours: "model.mtp_layers.0." + stored for ours, stored in MIMO.items()}
DEEPSEEK = {"layers.0.": "", "eh_proj.": "eh_proj.", "norm.": "shared_head.norm."}
DEEPSEEK |= {"hnorm.": "hnorm.", "enorm.": "enorm."}
DEEPSEEK = {ours: "model.layers.2." + stored for ours, stored in DEEPSEEK.items()}
NAMES = {"mtp": QWEN, "model.mtp_layers": MIMO, "layer after the last": DEEPSEEK}


def head_tensors() -> tuple[Any, dict[str, Tensor]]:
    model = tiny.model_config(ARCH)
    sizes = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    config = heads.head_config("mtp", ARCH, intermediate_size=model.intermediate_size, **sizes)
    return config, heads.head_tensors(config)


def write_model(folder: Path, names: dict[str, str], **config: Any) -> dict[str, Tensor]:
    """Write the tiny target with an MTP layer under the names of a public format; return the MTP tensors."""
    made = tiny.checkpoint(ARCH)
    saved = Path(heads.save_model(f"mtp-in-model/{folder.name}", made.config, made.tensors))
    raw = json.loads((saved / "config.json").read_text()) | {"model_type": "qwen3"} | config
    (folder / "config.json").write_text(json.dumps(raw))
    _, tensors = head_tensors()
    stored = dict(load_file(saved / "model.safetensors"))
    for name, tensor in tensors.items():
        prefix = next(prefix for prefix in names if name.startswith(prefix))
        stored[names[prefix] + name.removeprefix(prefix)] = tensor
    save_file(stored, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("names", NAMES)
def test_model_folder_with_mtp_tensors_loads_target_and_head(tmp_path: Path, names: str) -> None:
    tensors = write_model(tmp_path, NAMES[names], num_nextn_predict_layers=1)
    found = load_checkpoint(tmp_path)
    want = tiny.checkpoint(ARCH)
    assert found.config.mtp_source == str(tmp_path)
    assert found.tensors.keys() == want.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in want.tensors.items())
    config, weights = read_draft_head(tmp_path, 2)
    assert replace(config, target=head_tensors()[0].target) == head_tensors()[0]
    got = dequantize_all(weights)
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


def engine(folder: Path, speculative: dict[str, Any] | None) -> Engine:
    config = EngineConfig(
        model=str(folder),
        speculative=SpeculativeConfig.parse(speculative) if speculative else None,
        device="cpu",
        max_model_len=128,
        max_num_seqs=4,
        warm_up=False,
    )
    return Engine(config, load_checkpoint(folder))


def test_method_mtp_without_model_drafts_with_the_layers_of_the_target(tmp_path: Path) -> None:
    write_model(tmp_path, QWEN)
    params = SamplingParams(temperature=0.7, max_tokens=16, ignore_eos=True, logprobs=1)
    requests = [tiny.request(i, params) for i in range(2)]
    plain = tiny.run(engine(tmp_path, None), requests)
    spec = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    drafted = tiny.run(engine(tmp_path, spec), requests)
    assert {key: record.same() for key, record in plain.items()} == {
        key: record.same() for key, record in drafted.items()
    }
    assert sum(step.num_draft for record in drafted.values() for step in record.steps) > 20


def test_mtp_tensors_of_an_unknown_format_load_but_do_not_draft(tmp_path: Path) -> None:
    write_model(tmp_path, {prefix: "model.mtp_block.0." + prefix for prefix in QWEN})
    assert load_checkpoint(tmp_path).config.mtp_source == str(tmp_path)
    with pytest.raises(LoadError, match="neither an EAGLE head nor an MTP layer"):
        engine(tmp_path, {"method": "mtp"})


def test_layers_beyond_the_last_are_refused_unless_the_config_names_them(tmp_path: Path) -> None:
    write_model(tmp_path, DEEPSEEK)
    with pytest.raises(LoadError, match=r"no place for model\.layers\.2\."):
        load_checkpoint(tmp_path)
