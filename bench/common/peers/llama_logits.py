"""Logits of llama.cpp for given tokens, over the whole vocabulary.

The peer is a Python in whose environment `xllamacpp` is installed. That Python runs this file, which imports
nothing else but the standard library, and calls llama.cpp's C functions inside that package. It reads a count
and token ids (int32) from standard input and writes logits (fp32, one row a token) to standard output.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

UNUSED_BYTES = 1024  # longer than the rest of every parameter struct
INT_BYTES = 4


class LlamaLogits:
    """llama.cpp with one model in a process of its own."""

    def __init__(self, python: str, model: Path, context: int, threads: int) -> None:
        """Start the process with the Python at `python`."""
        command = [python, __file__, str(model), str(context), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        line = self._output.readline()
        if not line:
            raise RuntimeError(f"{python} did not load {model}: is xllamacpp installed there?")
        self.about = json.loads(line)
        self.vocab: int = self.about.pop("vocab")

    def logits(self, ids: list[int]) -> bytearray:
        """Return logits of one context: fp32 [len(ids), vocab]."""
        self._input.write(array.array("i", [len(ids), *ids]).tobytes())
        self._input.flush()
        data = bytearray(len(ids) * self.vocab * INT_BYTES)
        if read_into(self._output, data) != len(data):
            raise RuntimeError(f"llama.cpp ended with exit code {self._process.wait()}")
        return data

    def close(self) -> None:
        """End the process."""
        self._input.close()
        self._process.wait(60)


def read_into(source: BinaryIO, data: bytearray) -> int:
    """Fill `data` from a pipe; return the bytes that were read."""
    view, count = memoryview(data), 0
    while count < len(data) and (part := source.read(min(1 << 20, len(data) - count))):
        view[count : count + len(part)] = part
        count += len(part)
    return count


class ContextParams(ctypes.Structure):
    """The first fields of `llama_context_params`; all others keep their defaults."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, ctypes.c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, ctypes.c_int32) for name in ("n_threads", "n_threads_batch")),
        ("unused", ctypes.c_byte * UNUSED_BYTES),
    ]


class ModelParams(ctypes.Structure):
    """`llama_model_params`, of which all fields keep their defaults."""

    _fields_ = [("unused", ctypes.c_byte * UNUSED_BYTES)]


class Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def load(model: str, context: int, threads: int) -> tuple[ctypes.CDLL, int, int]:
    """Return the library, a context of the model and the size of its vocabulary."""
    from xllamacpp import xllamacpp  # type: ignore[import-not-found]

    library = ctypes.CDLL(xllamacpp.__file__)
    library.llama_model_default_params.restype = ModelParams
    library.llama_context_default_params.restype = ContextParams
    library.llama_batch_init.restype = Batch
    library.llama_decode.argtypes = [ctypes.c_void_p, Batch]
    library.llama_get_logits.argtypes = [ctypes.c_void_p]
    library.llama_get_logits.restype = ctypes.c_void_p
    library.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
    library.llama_init_from_model.argtypes = [ctypes.c_void_p, ContextParams]
    for name in ("llama_get_memory", "llama_model_get_vocab", "llama_vocab_n_tokens"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    for name in ("llama_get_memory", "llama_model_get_vocab", "llama_model_load_from_file",
                 "llama_init_from_model"):  # fmt: skip
        getattr(library, name).restype = ctypes.c_void_p
    library.llama_backend_init()
    loaded = library.llama_model_load_from_file(model.encode(), library.llama_model_default_params())
    if not loaded:
        raise SystemExit(f"llama.cpp cannot load {model}")
    params = library.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = context
    params.n_outputs_max_per_seq = context
    params.n_threads = params.n_threads_batch = threads
    made = library.llama_init_from_model(loaded, params)
    if not made:
        raise SystemExit(f"llama.cpp cannot make a context of {context} tokens")
    return library, made, library.llama_vocab_n_tokens(library.llama_model_get_vocab(loaded))


def main(model: str, context: int, threads: int) -> None:
    """Compute logits until standard input is closed."""
    import xllamacpp

    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # llama.cpp prints too
    library, made, vocab = load(model, context, threads)
    about = {"vocab": vocab, "xllamacpp": xllamacpp.__version__}
    about["instructions"] = xllamacpp.get_system_info().strip(" |")
    output.write(json.dumps(about).encode() + b"\n")
    output.flush()
    batch = library.llama_batch_init(context, 0, 1)
    while head := sys.stdin.buffer.read(INT_BYTES):
        count = int.from_bytes(head, sys.byteorder)
        ids = array.array("i", sys.stdin.buffer.read(count * INT_BYTES))
        batch.n_tokens = count
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
        library.llama_memory_clear(library.llama_get_memory(made), True)
        if library.llama_decode(made, batch):
            raise SystemExit("llama_decode failed")
        output.write(ctypes.string_at(library.llama_get_logits(made), count * vocab * INT_BYTES))
        output.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
