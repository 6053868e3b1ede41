"""Settings, markers and fixtures that all tests share."""

from __future__ import annotations

import fcntl
import gc
import os
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import compile_once
from draftproof.engine.step import warmup
from draftproof.ops.cpu import executor
from draftproof.ops.cpu.jit import parallel_compile, release_memory
from draftproof.text.grammar import compiler
from draftproof.train import pipeline

pytest_plugins = ["cpu_times"]


def lock_first_imports() -> int | None:
    """Let one xdist worker import all tests before the others, where no run has compiled the modules yet.

    Each of them would compile all modules. Return the file of the lock, if this process is to close it.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ or (Path(__file__).parents[1] / ".pytest_cache").exists():
        return None
    file = os.open(__file__, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


_lock = lock_first_imports()
gc.disable()  # until all tests are imported: a fifth of that time, for objects that stay

# Tensors are tiny: threads cost more than they save. The cpu backend has a thread pool of its own.
torch.set_num_threads(1)
if "PYTEST_XDIST_WORKER" in os.environ:  # programs that tests start use one thread as well
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers use all cores. Children of one would compile the device functions of their kernels again.
parallel_compile.MAX_PROCESSES = 1
compile_once.install()
# Engines time their steps at start-up: longer than most tests of a real model, and of no use to them.
MAX_TIMED_ROWS = 16
warmup.TIMING_ROUNDS = 1
warmup.sample_row_counts = lambda max_rows: [1, max_rows]
_run_forward = warmup.WarmUp.run_forward


@wraps(_run_forward)
def _run_small_forward(self: warmup.WarmUp, size: int) -> None:
    _run_forward(self, min(size, MAX_TIMED_ROWS))


warmup.WarmUp.run_forward = _run_small_forward  # type: ignore[method-assign]
# Pages of torch that each engine would release are needed by the next engine of the process.
executor.release_start_up_memory = release_memory.release_start_up_memory = lambda: None
pipeline.gc = SimpleNamespace(collect=lambda: None)  # type: ignore[assignment]  # before each trainer
compiler.COMPILE_SECONDS = 120.0  # on a loaded machine

# Test files without kernels of the CPU, which `make test` compiles in another process meanwhile.
FIRST_FILES = (
    *("ops_triton", "grammar_masks", "adaptive", "stubs", "architecture", "frame", "bad_endpoints", "load"),
    *("tool_calls", "tool_call_oracle", "kv_operands"),
)
# Test files that take longest, in order: xdist workers that share the files then finish together.
LONGEST_FILES = (
    *("exact", "forward", "train", "grammar_json", "bits", "tensor_parallel", "train_command"),
    *("exact_smollm2", "ops_step", "transformers_smollm2", "endings", "distribution", "grammar_text", "soak"),
    *("serve_command", "endings_text", "supervisor", "transformers", "serve_schema", "overlap", "train_mtp"),
    *("examples", "sampling", "native_mtp", "remote_engine", "output_table", "llm", "cli"),
)
# Files of tests that take more than a few seconds each; `make test-fast` runs only what they mark as fast.
SLOW_FILES = frozenset(LONGEST_FILES) | {
    *("ops_triton", "grammar_masks", "kv_operands"),
    *(
        "async_ends",
        "async_llm",
        "calibration",
        "chat_terminal",
        "compiling",
        "deep_queue",
        "device_proposers",
    ),
    *("draft_model", "exact_controls", "faults", "gguf_blocks", "grammar", "grammar_budget", "statistics"),
    *("grammar_schemas", "graph_memory", "heads", "hybrid", "plan", "proposer_failures", "serve_tools"),
    *("serve_hardening", "serve_mixed", "serve_reasoning", "serve_responses", "serve_tool_formats"),
    *("structural_tag", "thinking_budget", "tool_grammar", "kv_formats", "packed_store", "quantize"),
    *("quantized_checkpoints", "bench_head", "stubs", "transformers_sampling"),
    *("bad_endpoints", "command", "latent", "moe", "serve_completion_options", "serve_messages"),
    *("serve_tensor_parallel", "surrogates", "tool_call_oracle"),
    *("update_engine", "update_ranks", "update_served"),
    *("beam_search", "embeddings", "frame", "gguf_families", "gpt_oss", "serve_embeddings"),
}
# Fixtures and files that need the default model, which is downloaded.
NETWORK_FIXTURES = frozenset({"smollm2", "smollm2_path"})
NETWORK_FILES = frozenset({"examples", "exact_smollm2", "transformers_smollm2", "serve_smollm2", "shipped"})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread whose tests `-m` excludes: slow ones, unless some tests in them are fast."""
    name, excluded = collection_path.stem.removeprefix("test_"), config.option.markexpr
    if "not gpu" in excluded and collection_path.parent.name == "gpu":
        return True
    if "not network" in excluded and name in NETWORK_FILES and collection_path.suffix == ".py":
        return True
    if "not slow" in excluded and name in SLOW_FILES and collection_path.suffix == ".py":
        return "mark.fast" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by file, fixture and docstring, and sort files by `FIRST_FILES` and `LONGEST_FILES`."""
    order = {name: i for i, name in enumerate((*FIRST_FILES, *LONGEST_FILES))}
    for item in items:
        name = item.path.stem.removeprefix("test_")
        if name in SLOW_FILES and item.get_closest_marker("fast") is None:
            item.add_marker(pytest.mark.slow)
        if name in NETWORK_FILES or NETWORK_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.network)
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
        doc = getattr(getattr(item, "obj", None), "__doc__", None) or ""
        if "control" in item.name or doc.startswith("Negative control"):
            item.add_marker(pytest.mark.control)
    items.sort(key=lambda item: order.get(item.path.stem.removeprefix("test_"), len(order)))


def pytest_collection_finish() -> None:
    """Exclude modules and tests, which stay until the process ends, from garbage collection."""
    if _lock is not None:
        os.close(_lock)
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000)  # tests make many objects, and few cycles


@pytest.fixture(scope="session")
def smollm2():
    """Return dtype -> checkpoint of the default model, loaded once and copied for each engine."""
    from draftproof.models.load import Checkpoint, load_checkpoint

    loaded = {}

    def checkpoint(dtype: str) -> Checkpoint:
        if dtype not in loaded:
            loaded[dtype] = load_checkpoint("smollm2-135m", dtype=dtype)
        made = loaded[dtype]
        return made.copy()

    return checkpoint


@pytest.fixture(scope="session")
def smollm2_path():
    """Return the file of the default model, downloaded once."""
    from draftproof.config import DEFAULT_MODEL
    from draftproof.models.hub import find_model

    return find_model(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="session")
def make(tmp_path_factory):
    """Return a builder of tiny LLMs whose vocabulary is a few text pieces."""
    import json
    from functools import partial

    from async_serving import tiny_llm
    from text_pieces import CONFIG

    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return partial(tiny_llm, str(folder))


@pytest.fixture(scope="session")
def alone(make):
    """Return the outputs of `async_serving.CASES`, each alone."""
    from async_serving import reference_outputs

    return reference_outputs(make)
