"""GGUF file reader: header parsing with checks, and dequantisation of tensors. Does not import torch.

The header is parsed here because the `gguf` package takes seconds for a large vocabulary and raises an index
error on a damaged file. Quantised blocks are dequantised by `gguf`.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftproof.errors import LoadError

MAGIC = b"GGUF"

# GGML type id -> (name, elements in a block, bytes of a block), for the supported types.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9

# Beginnings of other contents that files with a model's name have.
_CONTENTS = (
    (b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with `git lfs pull`"),
    (b"PK", "a zip archive: a wheel or a PyTorch checkpoint"),
    (b"<", "an HTML page: the download failed"),
    (MAGIC, "it is a GGUF file"),
)

# Control tokens that end a turn even where the metadata names only the end of the text.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>")
_CONTROL = 3  # tokenizer.ggml.token_type


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of a tensor in the file. `shape` is in torch's order, the slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the beginning of the file


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Header of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reader of consecutive little-endian values that detects the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.size = data, 0, len(data)

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > self.size:
            raise LoadError(f"the file ends inside its header, at byte {self.size}: truncated")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """Read `count` strings in one loop: a vocabulary has a hundred thousand."""
        data, at, length, found = self.data, self.at, struct.Struct("<Q"), []
        for _ in range(count):
            start = at + length.size
            at = start + length.unpack_from(data, at)[0] if start <= self.size else start
            if at > self.size:
                self.take(self.size + 1)  # raises the error for a truncated file
            found.append(data[start:at].decode("utf-8", errors="replace"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.number("I"), self.number("Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                packed = self.take(count * struct.calcsize(code))
                return list(struct.unpack(f"<{count}{code}", packed))
            if item == _STRING:
                return self.strings(count)
            return [self.value(item) for _ in range(count)]
        raise LoadError(f"metadata value of unknown type {kind}: the header is damaged")


def is_gguf(path: Path) -> bool:
    """Return whether the file begins with the GGUF magic."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of the file at `path`; LoadError describes the damage."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < 24:
                raise LoadError(f"{path}: not a GGUF file: it has only {file.tell()} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except LoadError as error:
        text = str(error)
        raise LoadError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    except (struct.error, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise LoadError(f"{path}: the GGUF header is damaged: {error}") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data)
    if (magic := cursor.take(4)) != MAGIC:
        hint = content_hint(data[:64], "GGUF")
        raise LoadError(f"not a GGUF file: it begins with {magic!r}, not {MAGIC!r}{hint}")
    version = cursor.number("I")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        raise LoadError("it is big-endian" if swapped else f"GGUF version {version}, not 2 or 3")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    raw = []
    for _ in range(num_tensors):
        name, dims = cursor.string(), cursor.number("I")
        if dims > 8:
            raise LoadError(f"tensor {name!r} has {dims} dimensions: the header is damaged")
        shape = struct.unpack(f"<{dims}Q", cursor.take(8 * dims))[::-1]
        raw.append((name, shape, cursor.number("I"), cursor.number("Q")))
    align = int(metadata.get("general.alignment", 32))
    if align <= 0:
        raise LoadError(f"general.alignment is {align}: the header is damaged")
    start = -(-cursor.at // align) * align
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in raw:
        if name in tensors:
            raise LoadError(f"tensor {name!r} is in the file twice")
        info = TensorInfo(name, tuple(shape), type_id, start + offset)
        if type_id in TYPES and info.offset + num_bytes(info) > cursor.size:
            raise LoadError(
                f"tensor {name!r} ends at byte {info.offset + num_bytes(info)} but the file has "
                f"{cursor.size}: it is truncated"
            )
        tensors[name] = info
    return GGUFFile(path, metadata, tensors)


def content_hint(start: bytes, read_as: str) -> str:
    """Return a hint about a file that begins with `start` and could not be read as GGUF or safetensors."""
    for prefix, hint in _CONTENTS:
        if start.lstrip().startswith(prefix):
            return f" ({hint})"
    return " (it looks like safetensors)" if read_as == "GGUF" and start[8:9] == b"{" else ""


def type_name(type_id: int) -> str:
    """Return the name of a GGML type, supported or not."""
    if type_id in TYPES:
        return TYPES[type_id][0]
    import gguf  # only for the error message

    try:
        return str(gguf.GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"number {type_id}"


def num_bytes(info: TensorInfo) -> int:
    """Return the bytes of a tensor in the file; its type must be in TYPES."""
    _, block, size = TYPES[info.type_id]
    if info.shape and info.shape[-1] % block:
        raise LoadError(f"tensor {info.name!r}: rows of {info.shape[-1]} are not whole blocks of {block}")
    return math.prod(info.shape) // block * size


def check_types(file: GGUFFile) -> None:
    """Raise LoadError with the first tensor whose type is not supported."""
    for info in file.tensors.values():
        if info.type_id not in TYPES:
            known = ", ".join(name for name, _, _ in TYPES.values())
            raise LoadError(
                f"{file.path}: tensor {info.name!r} has type {type_name(info.type_id)}, "
                f"which is not supported; supported: {known}"
            )


def dequantize(raw: np.ndarray[Any, Any], info: TensorInfo) -> np.ndarray[Any, Any]:
    """Return an fp32 array of `info.shape` from the bytes of the whole file, `raw` [file size] uint8."""
    name, block, size = TYPES[info.type_id]
    data = raw[info.offset : info.offset + num_bytes(info)]
    if name == "F32":
        values = data.view(np.float32).copy()
    elif name == "F16":
        values = data.view(np.float16).astype(np.float32)
    else:
        import gguf  # imported late: weights that are computed from blocks do not need it

        rows = data.reshape(-1, info.shape[-1] // block * size)
        with np.errstate(all="ignore"):  # values of a damaged scale are checked below
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(info.type_id))
    if not np.isfinite(values).all():
        raise LoadError(f"tensor {info.name!r} holds values that are not finite: the file is damaged")
    return np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)


def end_token_ids(meta: dict[str, Any]) -> tuple[int, ...]:
    """Return every token that ends the output, by the metadata and by name."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [meta[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in meta]
    types = meta.get("tokenizer.ggml.token_type", ())
    tokens = meta.get("tokenizer.ggml.tokens", ())
    named = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_OF_TURN
    ]
    return tuple(dict.fromkeys([*ids, *named]))
