"""Servers for `bench/exactness/audit.py ours`: every proposer and strategy, as `draftproof serve` runs them.

`smollm2`: the default model. `tiny`: random weights, with an MTP layer in the checkpoint, a draft model and
an EAGLE head, for proposers that need one. A tied LM head repeats tokens, so that drafts are accepted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common.serving.server_process import served
from safetensors.torch import save_file

from draftproof.audit.prompts import PASSAGE
from draftproof.audit.report.verdict import Report
from draftproof.audit.runner import audit
from draftproof.config import DEFAULT_MODEL
from draftproof.models.draft_head.mtp_forms import MTP_FORMS
from draftproof.models.expected_tensors import dummy_tensors, expected_tensors
from draftproof.models.load import load_config

MTP_FORM = "deepseek"
MAX_TOKENS = 2048
DRAFT_NOISE = 0.05  # standard deviation of what a weight of the draft model differs by
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix"}
FIXED = {"adaptive": False}  # random drafts are accepted seldom and would be switched off


@dataclass(frozen=True)
class Server:
    """One server: model, speculation, and fields of every request."""

    model: str  # "smollm2" or "tiny"
    speculation: Mapping[str, Any] | None  # None: off
    body: Mapping[str, Any] = field(default_factory=dict)
    api: str = "completions"


SERVERS: Mapping[str, Server] = {
    "smollm2 ngram": Server("smollm2", NGRAM),
    "smollm2 eagle3": Server("smollm2", {"method": "eagle3"}),
    "smollm2 given": Server(
        "smollm2",
        {"method": "given", "prompt_lookup_min": 1, **FIXED},
        {"prediction": {"type": "content", "content": PASSAGE}},
        "chat",
    ),
    "smollm2 ngram topp": Server("smollm2", {**NGRAM, **FIXED, "verify_strategy": "topp"}),
    "smollm2 ngram accept_all": Server("smollm2", {**NGRAM, **FIXED, "accept_policy": "accept_all"}),
    "tiny none": Server("tiny", None),
    "tiny ngram": Server("tiny", NGRAM),
    "tiny suffix": Server("tiny", SUFFIX),
    "tiny draft_model": Server("tiny", {"method": "draft_model", "model": "draft", **FIXED}),
    "tiny mtp": Server("tiny", {"method": "mtp", **FIXED}),
    "tiny eagle": Server("tiny", {"method": "eagle", "model": "eagle", **FIXED}),
    "tiny hybrid": Server("tiny", {"method": "hybrid", "proposers": [SUFFIX, NGRAM]}),
    "tiny ngram rejection": Server("tiny", {**NGRAM, **FIXED, "verify_strategy": "rejection"}),
    "tiny draft_model rejection": Server(
        "tiny", {"method": "draft_model", "model": "draft", **FIXED, "verify_strategy": "rejection"}
    ),
    "tiny ngram greedy": Server("tiny", {**NGRAM, **FIXED, "verify_strategy": "greedy"}),
    "tiny ngram reject_all": Server("tiny", {**NGRAM, **FIXED, "accept_policy": "reject_all"}),
    "tiny ngram topp": Server("tiny", {**NGRAM, **FIXED, "verify_strategy": "topp"}),
    "tiny mtp topp": Server("tiny", {"method": "mtp", **FIXED, "verify_strategy": "topp"}),
    "tiny ngram accept_all": Server("tiny", {**NGRAM, **FIXED, "accept_policy": "accept_all"}),
}


def ours(budget_tokens: int, cases: Collection[str] | None) -> Iterator[tuple[str, Report]]:
    """Audit each server."""
    with tempfile.TemporaryDirectory() as name:
        target = write_models(Path(name))
        for case, server in SERVERS.items():
            if cases is not None and case not in cases:
                continue
            config = speculative_config(server, target.parent)
            options = ["--device", "cpu", "--max-num-seqs", "16", "--max-model-len", str(MAX_TOKENS)]
            options += ["--speculative-config", config]
            model = str(target) if server.model == "tiny" else DEFAULT_MODEL
            with served(model, *options) as program:
                report = audit(
                    program.url,
                    api=server.api,
                    budget_tokens=budget_tokens,
                    body=server.body,
                    timeout_seconds=600,
                )
            yield case, report


def speculative_config(server: Server, folder: Path) -> str:
    """Return the value of `--speculative-config`; `folder` holds the drafters."""
    if server.speculation is None:
        return "off"
    speculation = {"num_speculative_tokens": 4, **server.speculation}
    if "model" in speculation:
        speculation["model"] = str(folder / speculation["model"])
    return json.dumps(speculation)


def write_models(folder: Path) -> Path:
    """Write a tiny model with an MTP layer and return its folder; write its draft model and EAGLE head.

    The draft model has almost the same weights, the EAGLE head is the first layer of the model.
    """
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
    from serving import make_folder

    made = []
    for name in ("target", "draft", "eagle"):
        (folder / name).mkdir()
        path = make_folder(folder / name) / "config.json"
        config = {**json.loads(path.read_text()), "max_position_embeddings": MAX_TOKENS, "dtype": "float32"}
        if name == "target":
            config["num_nextn_predict_layers"] = 1
        path.write_text(json.dumps(config))
        made.append(folder / name)
    target, draft, eagle = made
    config, _ = load_config(draft)
    weights = dummy_tensors(config, torch.float32, 5)
    generator = torch.Generator().manual_seed(7)
    save_file({**weights, **mtp_layer(target, generator)}, target / "model.safetensors")
    moved = {
        k: t + DRAFT_NOISE * t.std() * torch.randn(t.shape, generator=generator) for k, t in weights.items()
    }
    save_file(moved, draft / "model.safetensors")
    layer = {k.removeprefix("model."): t for k, t in weights.items() if k.startswith("model.layers.0.")}
    hidden = config.hidden_size
    joined = torch.cat([torch.eye(hidden), 0.02 * torch.randn((hidden, hidden), generator=generator)], dim=1)
    norm = weights["model.norm.weight"]
    save_file({**layer, "fc.weight": joined, "norm.weight": norm}, eagle / "model.safetensors")
    return target


def mtp_layer(folder: Path, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return an MTP layer that drafts from the embedding of the last token, with a little noise."""
    config, _ = load_config(folder)
    form, hidden, first = MTP_FORMS[MTP_FORM], config.hidden_size, config.num_layers
    made = {}
    for ours_, stored in form.names(0, first).items():
        if ours_ == "eh_proj":
            made[f"{stored}.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
        elif ours_ not in ("lm_head", "embed_tokens"):
            made[f"{stored}.weight"] = torch.ones(hidden)
    layer = f"model.layers.{first}."
    for name, shape in expected_tensors(config.with_next_layers(1)).items():
        if name.startswith(layer):
            noise = 0.02 * torch.randn(shape, generator=generator)
            stored = form.prefix(0, first) + name.removeprefix(layer)
            made[stored] = 1 + noise if "norm" in name else noise
    return made
