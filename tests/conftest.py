"""Settings and fixtures that every test shares."""

from __future__ import annotations

import os

import pytest
import torch

# Tiny tensors: threads cost far more than they give. The cpu backend has its own team.
torch.set_num_threads(1)
if "PYTEST_XDIST_WORKER" in os.environ:  # nor do programs that tests start get in the other worker's way
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Files that take long, the longest first: workers that share the files then end together.
LONG = ["exact", "transformers_smollm2", "ops_step", "ops_triton", "ops_triton_blocks", "exact_smollm2"]
LONG += ["grammar_json", "serve_command", "examples", "grammar_text", "supervisor", "soak"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="session")
def smollm2():
    """dtype -> the default model's checkpoint, loaded once; the engine takes tensors out of a copy."""
    from draftproof.models.load import Checkpoint, load_checkpoint

    loaded = {}

    def checkpoint(dtype: str) -> Checkpoint:
        if dtype not in loaded:
            loaded[dtype] = load_checkpoint("smollm2-135m", dtype=dtype)
        made = loaded[dtype]
        return Checkpoint(made.config, dict(made.tensors), made.dtype, made.source, made.format)

    return checkpoint


@pytest.fixture(scope="session")
def smollm2_path():
    """The default model's file, fetched once."""
    from draftproof.config import DEFAULT_MODEL
    from draftproof.models.hub import find_model

    return find_model(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="session")
def make(tmp_path_factory):
    """Makes tiny LLMs with a made-up vocabulary of text pieces, for the tests of AsyncLLM."""
    import json
    from functools import partial

    from async_serving import tiny_llm
    from text_pieces import CONFIG

    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return partial(tiny_llm, str(folder))


@pytest.fixture(scope="session")
def alone(make):
    """The answers to `async_serving.ASKS`, each by itself."""
    from async_serving import answers_alone

    return answers_alone(make)
