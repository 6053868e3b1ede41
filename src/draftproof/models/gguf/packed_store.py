"""Cache of packed weights on disk: written while a model is packed for the first time, mapped afterwards.

A file holds the packed tensors one after another, an index in JSON, and a tail with the place of the index.
It is written under a temporary name and renamed when it is complete, so that several processes may start at
once. A file that is damaged is written again.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from draftproof.models.gguf.block_checksum import BlockChecksum, checksum_of_file
from draftproof.models.gguf.cache_files import TEMPORARY_PREFIX, cached_file, record_use, remove_unused
from draftproof.models.gguf.mapped_weights import GGUFWeight, chunk_ranges, decode_range
from draftproof.models.weight_formats import WeightTensor
from draftproof.ops import Ops, PackedState

FOLDER = "packed"  # in the cache folder
VERSION = 3  # of the decoding and the checksums; the packed form has a version of its own
TAIL = struct.Struct("<8sQQI")  # magic, place and bytes of the index, checksum of the index
MAGIC = b"DPPACK01"
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY  # a tensor begins on a page of its own
THREADS = max(1, min(8, os.cpu_count() or 1))
_LOG = logging.getLogger(__name__)


class PackedStore:
    """Packed weights of one GGUF file for one backend, read from the cache or added to it."""

    def __init__(self, ops: Ops, path: Path) -> None:
        self._ops, self._path = ops, path
        # one pool for all weights: each new thread may take memory of its own, which malloc keeps
        self._pool = ThreadPoolExecutor(THREADS)
        self._file: IO[bytes] | None = None  # that new weights are written to
        self._map, self._index = _read(path)
        if self._map is None:
            self._create()
        else:
            record_use(path)

    def packed(self, names: Sequence[str], parts: Sequence[WeightTensor], bias: Tensor | None) -> Any:
        """Return weights packed as one; None if they are not in the blocks of a GGUF file."""
        weights = [part for part in parts if isinstance(part, GGUFWeight)]
        if len(weights) < len(parts):
            return None
        name = " ".join(names)
        if self._map is not None and name in self._index:
            entry = self._index[name]
            return self._restore(entry, _view(self._map, entry["begin"], entry["shape"]), bias)
        return self._add(name, weights, bias)

    def _restore(self, entry: dict[str, Any], weight: Tensor, bias: Tensor | None) -> Any:
        return self._ops.forward.restore_packed(PackedState(weight, entry["columns"], entry["values"]), bias)

    def _add(self, name: str, weights: Sequence[GGUFWeight], bias: Tensor | None) -> Any:
        """Pack weights in chunks and append them to the file; without a file they stay in memory."""
        entry = self._write(self._states(weights))
        if entry is not None:
            self._index[name] = entry
            assert self._file is not None
            size, begin = entry["end"] - entry["begin"], entry["begin"]
            mapped = mmap.mmap(self._file.fileno(), size, offset=begin, access=mmap.ACCESS_COPY)
            made = self._restore(entry, _view(mapped, 0, entry["shape"]), bias)
        else:
            states = list(self._states(weights))
            entry = {"columns": sum(state.columns for state in states), "values": states[0].values}
            made = self._restore(entry, torch.cat([state.weight for state in states]), bias)
        for weight in weights:
            weight.release()
        return made

    def _states(self, weights: Sequence[GGUFWeight]) -> Iterator[PackedState]:
        """Pack chunk by chunk; no more than one for each thread are in memory."""

        def pack(rows: tuple[int, int]) -> PackedState:
            chunk = decode_range(weights, *rows)
            assert chunk.scales is not None
            return self._ops.forward.packed_state(chunk.format, chunk.data, chunk.scales)

        ranges = chunk_ranges(weights)
        for first in range(0, len(ranges), THREADS):
            yield from self._pool.map(pack, ranges[first : first + THREADS])

    def _create(self) -> None:
        """Open a temporary file beside the target. A folder that cannot be written is logged."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=TEMPORARY_PREFIX)
            self._temporary, self._file = Path(name), os.fdopen(handle, "w+b")
        except OSError as error:
            self._fail(error)

    def _write(self, states: Iterator[PackedState]) -> dict[str, Any] | None:
        """Append a weight at the beginning of a page; return its entry, or None if it is not in the file."""
        if self._file is None:
            return None
        try:
            self._file.seek(-(-self._file.tell() // PAGE_BYTES) * PAGE_BYTES)
            entry: dict[str, Any] = {"begin": self._file.tell(), "columns": 0, "shape": [0]}
            checksum = BlockChecksum()
            for state in states:
                data = state.weight.contiguous().view(torch.uint8).numpy().data
                checksum.add(data.cast("B"))
                entry["columns"] += state.columns
                entry["shape"] = [entry["shape"][0] + len(state.weight), *state.weight.shape[1:]]
                entry["values"] = state.values
                self._file.write(data)
            self._file.flush()
            return entry | {"end": self._file.tell(), "checksum": checksum.value()}
        except OSError as error:
            self._fail(error)
            return None

    def _fail(self, error: OSError) -> None:
        """Log that the next start will be as slow as this one; weights that were written stay mapped."""
        _LOG.warning("packed weights were not cached: %s", error)
        self.discard()

    def discard(self) -> None:
        """Remove what was written."""
        if self._file is not None:
            self._file.close()
            self._temporary.unlink(missing_ok=True)
            self._file = None

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def finish(self) -> None:
        """Write the index and give the file its name."""
        if self._file is None:
            return
        try:
            text = json.dumps(self._index).encode()
            place = self._file.tell()
            self._file.write(text + TAIL.pack(MAGIC, place, len(text), zlib.crc32(text)))
            self._file.close()
            os.replace(self._temporary, self._path)
            self._file = None
            remove_unused(self._path)
        except OSError as error:
            self._fail(error)


def _view(data: mmap.mmap, begin: int, shape: Sequence[int]) -> Tensor:
    count = int(torch.Size(shape).numel())
    return torch.frombuffer(data, dtype=torch.uint8, count=count, offset=begin).view(*shape)


def _read(path: Path) -> tuple[mmap.mmap | None, dict[str, dict[str, Any]]]:
    """Map a file and return its index; None if it is missing or damaged, so that it is written again."""
    if not path.exists():
        return None, {}
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        magic, place, size, checksum = TAIL.unpack(data[-TAIL.size :])
        text = data[place : place + size]
        if magic != MAGIC or zlib.crc32(text) != checksum:
            raise ValueError("the index is damaged")
        index: dict[str, dict[str, Any]] = json.loads(text)

        def is_intact(entry: dict[str, Any]) -> bool:
            return bool(checksum_of_file(path, entry["begin"], entry["end"]) == entry["checksum"])

        with ThreadPoolExecutor(THREADS) as pool:  # this pass also reads the file into the page cache
            if not all(pool.map(is_intact, index.values())):
                raise ValueError("a tensor is damaged")
        return data, index
    except (OSError, ValueError, struct.error) as error:
        _LOG.warning("packing again: %s: %s", path, error)
        return None, {}


@contextmanager
def packed_store(ops: Ops, weights: Sequence[WeightTensor]) -> Iterator[PackedStore | None]:
    """Open the store of the GGUF file that `weights` are in; None if there is none for this backend.

    The file gets its name at the end, and is removed if the model could not be packed.
    """
    sources = {weight.source for weight in weights if isinstance(weight, GGUFWeight)}
    source = sources.pop() if len(sources) == 1 else None
    if source is None or ops.forward.packed_version is None:
        yield None
        return
    version = f"{ops.forward.packed_version}-{VERSION}"
    store = PackedStore(ops, cached_file(FOLDER, source, version, ".packed"))
    try:
        yield store
    except BaseException:
        store.discard()
        raise
    finally:
        store.close()
    store.finish()
