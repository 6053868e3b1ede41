"""Heads that come with the package, each found by the model that it was made for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from draftproof.models.config import ModelConfig, read_json
from draftproof.models.draft_head.config import HeadConfig, Target

HEADS = Path(__file__).parent  # one folder each, in our own format


@cache
def shipped(heads: Path = HEADS) -> dict[Path, HeadConfig]:
    """Every head that there is, by its folder."""
    found = sorted(heads.glob("*/config.json"))
    return {path.parent: HeadConfig.from_json(read_json(path)) for path in found}


def shipped_for(kind: str, target: Target) -> Path | None:
    """The head of this kind whose model is this one, whatever its file, dtype or quantisation."""
    return next((f for f, head in shipped().items() if head.kind == kind and head.target == target), None)


def shipped_like(kind: str, model: ModelConfig) -> Path | None:
    """One whose model has these sizes: enough to say how much memory it will take."""
    for folder, head in shipped().items():
        target = head.target
        sizes = target.hidden_size, target.vocab_size, target.num_layers
        if head.kind == kind and sizes == (model.hidden_size, model.vocab_size, model.num_layers):
            return folder
    return None
