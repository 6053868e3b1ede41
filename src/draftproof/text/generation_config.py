"""Sampling defaults of a model: generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftproof.errors import LoadError, RequestError
from draftproof.models.config import read_json
from draftproof.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"
# keys of the file, and the options that they set; the same as in vLLM
OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_options(setting: str, source: Path | None) -> dict[str, Any]:
    """Return the sampling options of requests that give none, by their names in SamplingParams.

    `setting`: "auto" reads the file of the model at `source`, if it has one; "vllm" reads none; any other
    value is a folder with the file.
    """
    folder = source if setting == "auto" else Path(setting).expanduser()
    if setting == "vllm" or folder is None:
        return {}
    path = folder / FILE_NAME
    if not path.is_file():
        if setting == "auto":
            return {}
        raise LoadError(f"generation_config: {path} does not exist; use 'auto', 'vllm' or a folder with it")
    values = read_json(path)
    given = {name: values[key] for key, name in OPTIONS.items() if values.get(key) is not None}
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise LoadError(f"{path}: {error}; correct the file, or set generation_config='vllm'") from error
    return given
