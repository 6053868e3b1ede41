"""Architecture rules a machine can check: import direction, device access, sizes, vocabulary, documents."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import draftproof
from draftproof.cli.options_doc import with_table
from draftproof.config import EngineConfig
from draftproof.ops import BACKENDS
from draftproof.propose import PROPOSERS
from draftproof.registry import lookup
from draftproof.sampling_params import PYTHON_OPTIONS, SamplingParams
from draftproof.speculative_config import SpeculativeConfig
from draftproof.structured_outputs import StructuredOutputs
from draftproof.verify import STRATEGIES

ROOT = Path(draftproof.__file__).parent
REPO = ROOT.parent.parent

MAX_FILE_LINES = 400
MAX_CLASS_LINES = 250
MAX_FUNCTION_LINES = 70
MAX_FOLDER_FILES = 13  # without __init__.py

# A package may import packages of later lines; packages on one line never import each other.
LAYERS = [
    {"__main__", "ray"},
    {"cli"},
    {"serve", "simulate", "train", "audit"},
    {"async_llm"},
    {"llm"},
    {"frontend"},
    {"engine", "text"},
    {"propose", "verify"},
    {"models"},
    {"ops"},
    {"registry"},
    {"config", "types"},
    {"outputs"},
    {"speculative_config"},
    {"metrics", "sampling_params"},
    {"compat", "structured_outputs"},
    {"errors", "numba_jit", "array_types"},
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}

# Words that the field does not use for requests, drafts, steps and processes.
BANNED_IDENTIFIER_WORDS = re.compile(
    r"""nobody|somebody|anybody|whoever|newcomers?|tenant|guests?|purse|hopes?|hoped|hopeless|fear|feared|bury|reap
    |told|tells|hears?|heard|said|says|whom|laws?|wish|wishes|bell|desk|ledger|lessons|brings|asked|asks|asking
    |dear|judges?|judged|stood|fell|spoke|seated|farewell|teller|thoughts|sureness""",
    re.X,
)
BANNED_PROSE = re.compile(
    r"\b(nobody|somebody|anybody|whoever|newcomers?|tenants?|purse|hopes?|hoped|feared|bury|buried|reaps?"
    r"|tells|hears|heard|speaks|sits|wishes|ledger|brings|farewell|judges|judged|stands?(?!-)|stood|fell"
    r"|said|believed?|feels?)\b",
    re.I,
)
BANNED_DOCSTRING_STARTS = ("Of ", "And ", "The same", "Also ", "As ", "Those ", "Whose ")
STRING_WITH_BANNED_START = re.compile(rf"""["']\s*({"|".join(BANNED_DOCSTRING_STARTS)})""")


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def written_files() -> list[Path]:
    """Return all Python files of the repository that people write."""
    folders = (REPO / name for name in ("src", "tests", "bench", "examples"))
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def package_of(path: Path) -> str:
    """Return the top-level package or module that a source file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the dotted names that a module imports."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def nodes_of(source: str) -> list[ast.AST]:
    """Return the nodes of a module's syntax tree, the module first."""
    return list(ast.walk(ast.parse(source)))


def wrong_imports(nodes: Iterable[ast.AST], where: str) -> list[str]:
    """Return imports of a module in package `where` that go up or sideways."""
    found = []
    for name in imports(nodes):
        parts = name.split(".")
        if parts[0] != "draftproof" or len(parts) < 2 or parts[1] == where:
            continue
        if LEVEL[parts[1]] <= LEVEL[where]:
            found.append(name)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_module(path: Path) -> None:
    """Check imports, device access, compared names, file, class and function lengths of one source file."""
    source = path.read_text()
    nodes = nodes_of(source)
    check_compared_names(nodes, package_of(path))
    if path.name == "__init__.py" and path.parent == ROOT:
        return  # public names of all packages, loaded on first use
    assert package_of(path) in LEVEL, f"{package_of(path)} is a new package: add it to LAYERS"
    assert not wrong_imports(nodes, package_of(path))
    if package_of(path) != "ops":
        assert "torch.cuda" not in source and "import triton" not in source
    assert len(source.splitlines()) <= MAX_FILE_LINES, "split the file"
    assert ast.get_docstring(nodes[0]), "add a module docstring"
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    assert not [f for f in calls if isinstance(f, ast.Name) and f.id == "print"]
    kernels = "cpu" in path.parts or "triton" in path.parts
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and not kernels:
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long"
        if isinstance(node, ast.ClassDef):
            assert node.end_lineno - node.lineno < MAX_CLASS_LINES, f"{node.name} is too long"


def test_audit_imports_nothing_of_the_engine() -> None:
    """Check that the audit of endpoints depends on no part that it may have to test."""
    for path in (ROOT / "audit").rglob("*.py"):
        names = {name.split(".")[1] for name in imports(nodes_of(path.read_text())) if "draftproof." in name}
        assert names <= {"audit", "errors"}, f"{path.relative_to(ROOT)} imports {names}"


def test_folders_are_small() -> None:
    """Check that no source folder has more files than a reader can take in."""
    for folder in {path.parent for path in modules()}:
        files = [p for p in folder.glob("*.py") if p.name not in ("__init__.py", "__main__.py")]
        assert len(files) <= MAX_FOLDER_FILES, f"{folder.relative_to(REPO)} has {len(files)} files"


def test_wrong_import_is_detected() -> None:
    """Negative control for the import rule."""
    assert wrong_imports(nodes_of("from draftproof.verify import base"), "propose") == ["draftproof.verify"]
    assert wrong_imports(nodes_of("import draftproof.engine.loop"), "models") == ["draftproof.engine.loop"]
    assert not wrong_imports(nodes_of("from draftproof.ops import Ops"), "verify")


def split(name: str) -> list[str]:
    """Return the words of an identifier, split at underscores and capitals, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


@cache
def is_banned(name: str) -> bool:
    """Return whether an identifier has a banned word."""
    return any(map(BANNED_IDENTIFIER_WORDS.fullmatch, split(name)))


def banned_words(source: str) -> list[str]:
    """Return identifiers, comments and docstrings outside the field's vocabulary, with their lines."""
    has_words = any(map(is_banned, set(re.findall(r"\w+", source)))) or BANNED_PROSE.search(source)
    if not has_words and not STRING_WITH_BANNED_START.search(source):
        return []  # most files: they need not be parsed
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.NAME and is_banned(token.string):
            found.append(f"{line}: identifier {token.string}")
        if token.type == tokenize.COMMENT and (match := BANNED_PROSE.search(token.string)):
            found.append(f"{line}: comment with '{match.group()}'")
    for node in nodes_of(source):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is None:
                continue
            line = getattr(node, "lineno", 1)
            if match := BANNED_PROSE.search(text):
                found.append(f"{line}: docstring with '{match.group()}'")
            if text.startswith(BANNED_DOCSTRING_STARTS):
                found.append(f"{line}: docstring starts with '{text.split()[0]}'")
    return found


WRITTEN_FOLDERS = sorted({path.parent for path in written_files()})


@pytest.mark.parametrize("folder", WRITTEN_FOLDERS, ids=lambda p: str(p.relative_to(REPO)))
def test_vocabulary(folder: Path) -> None:
    """Check identifiers, comments and docstrings of a folder's files against the banned words."""
    others = (path for path in folder.glob("*.py") if path != Path(__file__))  # which defines the words
    found = {path.name: words for path in others if (words := banned_words(path.read_text()))}
    assert found == {}


def test_banned_words_are_detected() -> None:
    """Negative control for the vocabulary rule."""
    assert banned_words("def told(x): pass") == ["1: identifier told"]
    assert banned_words("askedFor = 1") == ["1: identifier askedFor"]
    assert banned_words("x = 1  # nobody reads this") == ["1: comment with 'nobody'"]
    assert banned_words("x = 1  # drafts that stand") == ["1: comment with 'stand'"]
    assert not banned_words("x = 1  # stand-in for a module")
    assert banned_words('def f():\n    """Of a request."""') == ["1: docstring starts with 'Of'"]
    assert not banned_words('def send(x):\n    """Send one request."""  # sent to the worker')


def check_compared_names(nodes: Iterable[ast.AST], package: str) -> None:
    """Check that code tests capabilities, never names such as `method == "ngram"`, outside the tables."""
    compares = (node for node in nodes if isinstance(node, ast.Compare))
    values = {n.value for node in compares for n in ast.walk(node) if isinstance(n, ast.Constant)}
    for names, home in ((PROPOSERS, "propose"), (STRATEGIES, "verify"), (BACKENDS, "ops")):
        if package not in (home, "config", "speculative_config", "cli"):
            assert not values & set(names), f"compares with {values & set(names)}"


def test_compared_method_name_is_detected() -> None:
    """Negative control for the rule on compared names."""
    nodes = nodes_of('if method == "ngram": pass')
    with pytest.raises(AssertionError, match="compares with"):
        check_compared_names(nodes, "engine")
    check_compared_names(nodes, "propose")


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


def test_every_option_is_documented() -> None:
    """Check that options of engine, speculation, requests and environment are in the documents."""
    options = (REPO / "docs" / "options.md").read_text()
    kinds = [lookup(table, name, "class") for table in (PROPOSERS, STRATEGIES) for name in table]
    names = {
        f.name for config in (EngineConfig, SpeculativeConfig, StructuredOutputs) for f in fields(config)
    }
    names |= {key for kind in kinds for key in kind.defaults} | set(PROPOSERS) | set(STRATEGIES)
    names |= set(re.findall(r"DRAFTPROOF_(?!CONTINUE)[A-Z_]+", "".join(p.read_text() for p in modules())))
    names -= {"speculative", "options"}  # containers of the others
    assert sorted(name for name in names if f"`{name}`" not in options) == []
    server = (REPO / "docs" / "server.md").read_text()
    request_options = {f.name for f in fields(SamplingParams)} - PYTHON_OPTIONS
    assert sorted(name for name in request_options if f"`{name}`" not in server) == []


def test_option_table_is_generated() -> None:
    """Check that docs/options.md holds the table that `make docs` writes."""
    text = (REPO / "docs" / "options.md").read_text()
    assert with_table(text) == text and "| `max_model_len` |" in text


def test_readme_map_equals_the_tree() -> None:
    """Check that the code map lists every package and top-level module, and nothing else."""
    text = (REPO / "README.md").read_text()
    tree = re.search(r"src/draftproof/\n(.*?)```", text, re.S)
    assert tree, "README has no code map"
    shown = {m.group(1) for m in re.finditer(r"^ {4}([a-z_]+)(?:/|\.py)\s", tree.group(1), re.M)}
    real = {package_of(p) for p in modules()} - {"__init__", "__main__"}
    assert shown == real
