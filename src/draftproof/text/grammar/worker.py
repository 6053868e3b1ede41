"""Grammar compiler process. It can be killed when a schema takes too much time or memory.

Run as a script by its path, so that only the compiler is imported. Frames on stdin and stdout are a length
and a pickle: first the vocabulary, then one job after another.

A warning of the compiler is a refusal: it warns where it ignores a part of a grammar.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import struct
import sys
import tempfile
from types import ModuleType
from typing import IO, Any

MAX_COMPILE_BYTES = 4 << 30
# A character of a string whose length is bounded, as the compiler writes it: control characters, which no
# JSON text may have in a string, are among them and are removed here.
LOOSE, TIGHT = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
MASK_BITS = 32  # tokens in an element of a mask
MAX_COMPILE_SECONDS = 60  # longer than any client waits
# A grammar as the compiler writes it: a pattern of a schema, a text, a set of characters.
_PARTS = re.compile(r'Regex\("((?:\\.|[^"\\])*)"|"((?:\\.|[^"\\])*)"|\[((?:\\.|[^\]\\])*)\]', re.DOTALL)
_SETS = re.compile(r"\[((?:\\.|[^\]\\])*)\]", re.DOTALL)
_CHARACTER = r"\\u\{[0-9A-Fa-f]+\}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\x[0-9A-Fa-f]{2}|\\.|[^\\]"
_RANGE = re.compile(rf"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|x([0-9A-Fa-f]{2}))|(.))", re.DOTALL)
_CODE = re.compile(r"\\[uUx]\{?([0-9A-Fa-f]+)\}?")
FIRST_SURROGATE, LAST_SURROGATE = 0xD800, 0xDFFF
FIRST_OF_LEAD = 0xD000  # first character whose UTF-8 begins with the byte of a surrogate
SURROGATE_NAMED = (
    "a text or set begins with a surrogate (U+D800 to U+DFFF), which is no character: write a character "
    "above U+FFFF as one code, and begin sets at U+E000"
)


def read_frame(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def write_frame(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _limit_memory() -> None:
    """Set a memory limit where the system supports one; a compilation beyond it fails by itself."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_COMPILE_BYTES, used + MAX_COMPILE_BYTES))


def _build(xgrammar: Any, info: Any, kind: str, source: str, options: dict[str, Any]) -> Any:
    compiler = xgrammar.GrammarCompiler(info, max_threads=min(4, os.cpu_count() or 1), cache_enabled=False)
    if kind == "json":
        grammar = xgrammar.Grammar.from_json_schema(source, strict_mode=True, **options)
        return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(str(grammar).replace(LOOSE, TIGHT)))
    if kind == "json_object":
        return compiler.compile_json_schema('{"type": "object"}', strict_mode=False, **options)
    if kind == "regex":
        return compiler.compile_regex(source)
    if kind == "structural_tag":
        grammar = xgrammar.Grammar.from_structural_tag(source)
        return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(str(grammar).replace(LOOSE, TIGHT)))
    if "::=" in source:
        return compiler.compile_grammar(source)
    return compiler.compile_lark(source)


def names_a_surrogate(grammar: str) -> bool:
    """Return whether a text or set of a grammar begins with a surrogate; no token could follow there."""
    for pattern, text, characters in (part.groups() for part in _PARTS.finditer(grammar)):
        if characters is not None and _begins_with_a_surrogate(characters):
            return True
        if pattern is not None:
            pattern = _ESCAPE.sub(_unescaped, pattern)
            if any(_begins_with_a_surrogate(found[1]) for found in _SETS.finditer(pattern)):
                return True
            text = _SETS.sub("", pattern)
        if text is not None and any(_is_surrogate(_code(found[0])) for found in _RANGE.finditer(text)):
            return True
    return False


def _unescaped(escape: re.Match[str]) -> str:
    """Return the character of an escape sequence of a text."""
    code = escape[1] or escape[2] or escape[3]
    return chr(int(code, 16)) if code else str(escape[4])


def _begins_with_a_surrogate(characters: str) -> bool:
    """Return whether a character set, without its brackets, begins inside the surrogates."""
    is_negated = characters.startswith("^")
    ranges = [
        (_code(found[1]), _code(found[2] or found[1])) for found in _RANGE.finditer(characters[is_negated:])
    ]
    if is_negated:
        merged: list[tuple[int, int]] = []
        for low, high in sorted(ranges):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        return any(
            low <= FIRST_OF_LEAD and FIRST_SURROGATE - 1 <= high < LAST_SURROGATE for low, high in merged
        )
    return any(_is_surrogate(low) for low, _ in ranges)


def _code(character: str) -> int:
    """Return the code point of a character or of its escape."""
    found = _CODE.fullmatch(character)
    return int(found[1], 16) if found else ord(character[-1])


def _is_surrogate(code: int) -> bool:
    """Return whether a code point is half of a pair of UTF-16."""
    return FIRST_SURROGATE <= code <= LAST_SURROGATE


def _allows_a_token(xgrammar: Any, info: Any, made: Any) -> bool:
    import numpy

    mask = numpy.full((1, -(-info.vocab_size // MASK_BITS)), -1, numpy.int32)
    xgrammar.GrammarMatcher(made).fill_next_token_bitmask(mask)
    return bool(mask.any())


def _compile(
    xgrammar: Any, info: Any, job: tuple[str, str, dict[str, Any]], log: IO[bytes]
) -> tuple[str, str]:
    log.seek(0)
    log.truncate()
    signal.alarm(MAX_COMPILE_SECONDS)  # the signal ends this process
    try:
        made = _build(xgrammar, info, *job)
        if names_a_surrogate(str(made.grammar)):
            return "refused", SURROGATE_NAMED
        if not _allows_a_token(xgrammar, info, made):
            return "refused", "no token of this vocabulary can begin it"
    except Exception as error:  # any exception of the compiler concerns this grammar
        full = isinstance(error, MemoryError) or "bad_alloc" in str(error)
        return "out_of_memory" if full else "refused", str(error)
    finally:
        signal.alarm(0)
    log.seek(0)
    warnings = [line for line in log.read().decode(errors="replace").splitlines() if "Warning: " in line]
    if warnings:
        return "refused", warnings[0].partition("Warning: ")[2]
    return "made", made.serialize_json()


class _Unused:
    """Stand-in for any class or function of a module that the compiler does not call."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass


class _UnusedModule(ModuleType):
    """Stand-in for a module and its submodules."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused


def _import_xgrammar() -> Any:
    """Import xgrammar without torch and transformers: 0.4 s instead of 3 s, and a fifth of the memory.

    It uses them for masks and for tokenizers of transformers, not to compile.
    """
    if sys.modules.get("torch"):  # imported by the site's configuration: it cannot be imported twice
        import xgrammar

        return xgrammar
    stubs: dict[str, Any] = {name: _UnusedModule(name) for name in ("torch", "transformers")}
    sys.modules["torch"] = None  # type: ignore[assignment]  # the import fails, which tvm_ffi expects
    try:
        import tvm_ffi  # noqa: F401

        sys.modules.update(stubs)
        import xgrammar
    except Exception:  # a version that needs them
        for name in [name for name in sys.modules if name.split(".")[0] in ("tvm_ffi", "xgrammar", *stubs)]:
            del sys.modules[name]
        import xgrammar
    return xgrammar


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - for the life of the process
    os.dup2(log.fileno(), 2)
    os.dup2(log.fileno(), 1)  # the compiler may print: keep the pipe of replies clean
    vocabulary, stops = read_frame(sys.stdin.buffer)
    try:
        xgrammar = _import_xgrammar()
        raw = xgrammar.VocabType.RAW
        size = len(vocabulary)
        info = xgrammar.TokenizerInfo(vocabulary, raw, vocab_size=size, stop_token_ids=stops)
    except Exception as error:
        write_frame(out, ("start_failed", f"{type(error).__name__}: {error}"))
        return
    _limit_memory()
    write_frame(out, ("ready", ""))
    status = ""
    with contextlib.suppress(EOFError):
        while status != "out_of_memory":  # too little memory is left for the next job
            status, text = _compile(xgrammar, info, read_frame(sys.stdin.buffer), log)
            write_frame(out, (status, text))


if __name__ == "__main__":
    main()
