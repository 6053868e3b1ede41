"""The house rules that a machine can hold: import direction, one place for the device, sizes, names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import draftproof
from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.ops import BACKENDS
from draftproof.propose import PROPOSERS
from draftproof.registry import lookup
from draftproof.sampling_params import SamplingParams
from draftproof.structured_outputs import StructuredOutputs
from draftproof.verify import STRATEGIES

ROOT = Path(draftproof.__file__).parent
REPO = ROOT.parent.parent

# A room may import rooms of later lines; rooms on one line never import each other.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"serve", "shown", "simulate", "train"},
    {"async_llm"},
    {"driver", "llm"},
    {"front"},
    {"jobs"},
    {"boxes", "engine", "text"},
    {"propose", "verify"},
    {"models"},
    {"ops"},
    {"registry"},
    {"config", "types"},
    {"metrics", "sampling_params"},
    {"structured_outputs"},
    {"errors", "native"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def wrong_imports(source: str, where: str) -> list[str]:
    """Imports that go up or sideways, for a module in the room `where`."""
    found = []
    for name in imports(ast.parse(source)):
        parts = name.split(".")
        if parts[0] != "draftproof" or len(parts) < 2 or parts[1] == where:
            continue
        if LEVEL[parts[1]] <= LEVEL[where]:
            found.append(name)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_module(path: Path) -> None:
    source = path.read_text()
    if path.name == "__init__.py" and path.parent == ROOT:
        return  # the public names, from everywhere, on first use
    assert room(path) in LEVEL, f"{room(path)} is a new room: place it in LAYERS"
    assert not wrong_imports(source, room(path))
    if room(path) != "ops":
        assert "torch.cuda" not in source and "import triton" not in source
    assert len(source.splitlines()) <= 400, "split it"
    tree = ast.parse(source)
    assert ast.get_docstring(tree), "say what and why"
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [f for f in calls if isinstance(f, ast.Name) and f.id == "print"]
    kernels = "cpu" in path.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not kernels:
            assert node.end_lineno - node.lineno < 70, f"{node.name} is long"


def test_a_wrong_import_is_seen() -> None:
    """Negative control: the check above can fail."""
    assert wrong_imports("from draftproof.verify import judge", "propose") == ["draftproof.verify"]
    assert wrong_imports("import draftproof.engine.loop", "models") == ["draftproof.engine.loop"]
    assert not wrong_imports("from draftproof.ops import Ops", "verify")


def test_names_stay_in_their_table() -> None:
    """Capabilities are asked for, never names: no `if method == "ngram"` outside the table."""
    for names, home in ((PROPOSERS, "propose"), (STRATEGIES, "verify"), (BACKENDS, "ops")):
        for path in modules():
            if room(path) in (home, "config", "cli"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare):
                    values = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                    said = set(values) & set(names)
                    assert not said, f"{path}: compares with {said}"


@pytest.mark.parametrize(
    ("table", "what"), [(PROPOSERS, "proposer"), (STRATEGIES, "strategy"), (BACKENDS, "backend")]
)
def test_tables_load(table: dict[str, str], what: str) -> None:
    for name in table:
        assert isinstance(lookup(table, name, what), type)


def test_public_names() -> None:
    assert sorted(draftproof.__all__) == sorted([*draftproof._HOMES, "__version__"])
    for name in draftproof.__all__:
        assert getattr(draftproof, name) is not None
    with pytest.raises(AttributeError):
        draftproof.nothing  # noqa: B018


def test_version_and_changelog_agree() -> None:
    pyproject = (REPO / "pyproject.toml").read_text()
    assert f'version = "{draftproof.__version__}"' in pyproject
    assert f"## {draftproof.__version__}" in (REPO / "CHANGELOG.md").read_text()


def test_every_option_is_in_the_documents() -> None:
    """Of an engine, of speculation, of a request, and of whatever reads the environment."""
    told = (REPO / "docs" / "options.md").read_text()
    kinds = [lookup(table, name, "class") for table in (PROPOSERS, STRATEGIES) for name in table]
    names = {
        f.name for config in (EngineConfig, SpeculativeConfig, StructuredOutputs) for f in fields(config)
    }
    names |= {key for kind in kinds for key in kind.defaults} | set(PROPOSERS) | set(STRATEGIES)
    names |= set(re.findall(r"DRAFTPROOF_(?!CONTINUE)[A-Z_]+", "".join(p.read_text() for p in modules())))
    names -= {"speculative", "options"}  # where the others are kept
    assert sorted(name for name in names if f"`{name}`" not in told) == []
    server = (REPO / "docs" / "server.md").read_text()
    asked = {f.name for f in fields(SamplingParams)} - {"logits_processors"}  # which no client can send
    assert sorted(name for name in asked if f"`{name}`" not in server) == []


def test_readme_map_is_the_house() -> None:
    """Every room and top-level module is on the map, and the map shows nothing else."""
    text = (REPO / "README.md").read_text()
    tree = re.search(r"src/draftproof/\n(.*?)```", text, re.S)
    assert tree, "README has a map"
    shown = {m.group(1) for m in re.finditer(r"^ {4}([a-z_]+)(?:/|\.py)\s", tree.group(1), re.M)}
    real = {room(p) for p in modules()} - {"__init__", "__main__"}
    assert shown == real
    named = set(re.findall(r"`(\w+\.(?:py|sh))`", (REPO / "bench" / "README.md").read_text()))
    assert named == {p.name for p in (REPO / "bench").iterdir() if p.suffix in (".py", ".sh")}
