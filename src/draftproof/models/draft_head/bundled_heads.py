"""Draft heads bundled with the package, looked up by the model they were trained for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from draftproof.models.config import ModelConfig, read_json
from draftproof.models.draft_head.config import DraftHeadConfig, TargetIdentity

BUNDLED_FOLDER = Path(__file__).parent  # one folder per draft head, in the package's own format


@cache
def bundled_heads(parent: Path = BUNDLED_FOLDER) -> dict[Path, DraftHeadConfig]:
    """Return folder -> configuration of every bundled draft head."""
    found = sorted(parent.glob("*/config.json"))
    return {path.parent: DraftHeadConfig.from_json(read_json(path)) for path in found}


def find_bundled_head(kind: str, target: TargetIdentity) -> Path | None:
    """Return the draft head of this kind that was trained for `target`, in whatever dtype the target is."""
    heads = bundled_heads().items()
    return next((folder for folder, head in heads if (head.kind, head.target) == (kind, target)), None)


def find_bundled_head_by_size(kind: str, model: ModelConfig) -> Path | None:
    """Return a draft head whose target has the sizes of `model`: enough to compute its memory."""
    for folder, head in bundled_heads().items():
        target = head.target
        sizes = target.hidden_size, target.vocab_size, target.num_layers
        if head.kind == kind and sizes == (model.hidden_size, model.vocab_size, model.num_layers):
            return folder
    return None
