"""Heads bundled with the package: their target, their drafts, exact output."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tiny
from draftproof.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.errors import ConfigError, LoadError
from draftproof.models.draft_head.bundled_heads import (
    bundled_heads,
    find_bundled_head,
    find_bundled_head_by_size,
)
from draftproof.models.draft_head.config import TargetIdentity
from draftproof.models.draft_head.formats import load_draft_head
from draftproof.models.load import load_checkpoint
from draftproof.sampling_params import SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.text.tokenizer import load_tokenizer
from draftproof.types import Request

PROMPT = "How many legs have two cats and a bird? Explain it step by step."
MEGABYTES = 12


@pytest.fixture(scope="module")
def target(smollm2) -> TargetIdentity:
    checkpoint = smollm2("bfloat16")
    return TargetIdentity.from_weights(checkpoint.config, checkpoint.tensors)


def test_bundled_heads_are_small_and_complete() -> None:
    assert bundled_heads(), "no head comes with the package"
    for folder, config in bundled_heads().items():
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert size <= MEGABYTES * 10**6, f"{folder.name}: {size} bytes"
        assert "Apache" in (folder / "LICENSE").read_text()
        assert config.target.digest


def test_bundled_head_is_found_by_its_target(smollm2, target: TargetIdentity) -> None:
    folder = find_bundled_head("eagle3", target)
    assert folder is not None and folder == find_bundled_head_by_size("eagle3", smollm2("bfloat16").config)
    config, _ = load_draft_head(folder, target)
    assert config.target == target
    wide = smollm2("float32")
    assert find_bundled_head("eagle3", TargetIdentity.from_weights(wide.config, wide.tensors)) == folder
    # Another kind, and a model that differs in its weights only.
    assert find_bundled_head("mtp", target) is None
    assert find_bundled_head("eagle3", replace(target, digest="0" * 32)) is None


def test_bundled_head_is_refused_for_another_model(target: TargetIdentity) -> None:
    def engine(options: dict[str, object]) -> Engine:
        spec = SpeculativeConfig.parse({"method": "eagle3", **options})
        config = EngineConfig(model="tiny", max_model_len=64, max_num_seqs=2, speculative=spec)
        return Engine(config, tiny.checkpoint("llama"))

    with pytest.raises(ConfigError, match="none for this model comes with the package"):
        engine({})
    with pytest.raises(LoadError, match="made for another model: its target's hidden size is 576"):
        engine({"model": str(find_bundled_head("eagle3", target))})


@pytest.mark.parametrize("is_unpacked", [True, False], ids=["bf16", "blocks"])
def test_bundled_head_is_exact_and_saves_steps(smollm2, smollm2_path, is_unpacked: bool) -> None:
    """The head reads the residual, which is fp32 behind blocks."""
    tokenizer = load_tokenizer(smollm2_path)
    ids = tokenizer.encode(f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n")

    def requests() -> list[Request]:
        params = [SamplingParams(temperature=t, max_tokens=32, logprobs=3) for t in (0.0, 1.0)]
        return [tiny.request(i, p, prompt_token_ids=ids) for i, p in enumerate(params)]

    def engine(spec: dict[str, object] | None) -> Engine:
        config = EngineConfig(
            model="smollm2-135m",
            max_model_len=256,
            max_num_seqs=2,
            speculative=SpeculativeConfig.parse(spec) if spec else None,
        )
        if is_unpacked:
            return Engine(config, smollm2("bfloat16"))
        return Engine(config, load_checkpoint("smollm2-135m", dtype="bfloat16", keep_blocks=True))

    plain = tiny.run(engine(None), requests())
    drafts = engine({"method": "eagle3", "num_speculative_tokens": 4, "adaptive": False})
    drafted = tiny.run(drafts, requests())
    for name, record in plain.items():
        assert drafted[name].same() == record.same()
        assert len(drafted[name].steps) < len(record.steps) / 1.3
