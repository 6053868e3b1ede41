"""Record the bits of generated tokens and logprobs, and compare them with a record of another commit.

    python bench/exactness/bits_between_commits.py --set tiny --out new.json
    PYTHONPATH=OTHER_CHECKOUT/src python bench/exactness/bits_between_commits.py --set tiny --out old.json
    python bench/exactness/bits_between_commits.py --set tiny --compare old.json

Only the public API is used, so the same script runs on two checkouts. A record holds one entry a case: a
SHA-256 over token ids, text, finish reason and the float64 bytes of every logprob, the first token ids, and
the first logprobs. `--compare` prints the cases that differ, and exits with status 1 if there are any.

tiny: models of random weights that this script writes. Every proposer serves every request option, with the
verification strategies in rotation, in a batch of 8; some requests alone. fp32 and bf16, two model families,
backends reference, torch and cpu (triton and torch on a GPU). tiny_full: every strategy with every option.
smollm2: the default model with its bundled EAGLE-3 head. llama8b: dummy weights in the shape of Llama-3-8B.
The number of drafts is fixed (`adaptive: false`) wherever an output may depend on it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import gc
import hashlib
import json
import math
import platform
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from exactness.bits_cases import EngineCase, llama8b, smollm2, tiny

import draftproof
from draftproof import LLM, RequestOutput, SamplingParams

SEPARATORS = (",", ":")  # of JSON, without spaces
NUM_RECORDED_TOKENS = 8
NUM_RECORDED_LOGPROBS = 2
SINGLE_INTERVAL = 4  # one of so many requests is served alone as well
DRAFT_COUNTS = {
    "num_draft_tokens": "drafted",
    "num_accepted_tokens": "accepted",
    "num_emitted_tokens": "tokens",
}


def digest(result: RequestOutput) -> dict[str, Any]:
    """Return the hash of one request's outputs, and their first tokens and logprobs."""
    found = hashlib.sha256()

    def add(kind: str, *values: Any) -> None:
        packed = [struct.pack("<d", v) if isinstance(v, float) else repr(v).encode() for v in values]
        found.update(b"|".join([kind.encode(), *packed, b";"]))

    def add_rows(kind: str, rows: Sequence[Mapping[int, Any] | None]) -> None:
        for row in rows:
            add(kind, None if row is None else len(row))
            for token, entry in sorted((row or {}).items()):
                add("entry", token, float(entry.logprob), entry.rank)

    add_rows("prompt", result.prompt_logprobs or ())
    for output in result.outputs:
        add(
            "output",
            output.index,
            tuple(output.token_ids),
            output.text,
            output.finish_reason,
            output.stop_reason,
        )
        add("cumulative", output.cumulative_logprob)
        add_rows("token", output.logprobs or ())
        for draft in output.drafts or ():
            add(
                "draft",
                draft.token_id,
                draft.position,
                draft.accepted,
                draft.draft_logprob,
                draft.target_logprob,
            )
    tokens, rows = result.outputs[0].token_ids, result.outputs[0].logprobs or ()
    first = zip(tokens[:NUM_RECORDED_LOGPROBS], rows, strict=False)
    return {
        "hash": found.hexdigest()[:16],
        "tokens": tokens[:NUM_RECORDED_TOKENS],
        "logprobs": [round(row[token].logprob, 6) for token, row in first],
    }


def run_engine(case: EngineCase) -> tuple[dict[str, dict[str, Any]], str]:
    """Build one engine and serve its requests; return the records and a line of draft counts."""
    defaults: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
        "seed": 1,
    }
    defaults["warm_up"] = case.options["device"] == "cuda"
    defaults["quantization"] = "none"  # recorded bits of the default model are those of its bf16 form
    llm = LLM(case.model, **{**defaults, **case.options})
    prompts = [case.prompts[i % len(case.prompts)] for i in range(len(case.requests))]
    params = [
        SamplingParams(**{"seed": i, "max_tokens": case.max_tokens, "ignore_eos": True, **options})
        for i, (_, options) in enumerate(case.requests)
    ]
    if case.name.endswith("/given"):
        params = [
            with_prediction(p, ids)
            for p, ids in zip(params, greedy_outputs(llm, prompts, case.max_tokens), strict=True)
        ]
    done = llm.generate(prompts, params, use_tqdm=False)
    records = {
        f"{case.name}/{what}/batch": digest(one) for (what, _), one in zip(case.requests, done, strict=True)
    }
    for i in range(0, len(params), 1 if case.serves_all_alone else SINGLE_INTERVAL):
        alone = llm.generate([prompts[i]], params[i], use_tqdm=False)
        records[f"{case.name}/{case.requests[i][0]}/alone"] = digest(alone[0])
    counts = [sum(getattr(one.metrics, name) for one in done) for name in DRAFT_COUNTS]
    llm.close()
    return records, ", ".join(f"{n} {name}" for n, name in zip(counts, DRAFT_COUNTS.values(), strict=True))


def greedy_outputs(llm: LLM, prompts: Sequence[Any], max_tokens: int) -> list[list[int]]:
    """Return what the model continues each prompt with, without drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculative=False)
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


def with_prediction(params: SamplingParams, ids: list[int]) -> SamplingParams:
    """Return the params with a prediction in which every sixth token is wrong."""
    return replace(params, prediction=[3 if i % 6 == 5 else token for i, token in enumerate(ids)])


def environment(device: str) -> dict[str, str]:
    """Return everything of this machine that bits may depend on."""
    found = {"machine": platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability()}
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    for line in lines[: lines.index("") if "" in lines else 0]:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "CPU implementer", "CPU part"):
            found[key.strip()] = value.strip()
    for package in ("torch", "triton" if device == "cuda" else "numba"):
        found[package] = version(package) if find_spec(package) else "none"
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def record(
    cases: Iterable[EngineCase],
    device: str,
    seconds: float = math.inf,
    only: str = "",
    save: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run the engines whose name contains `only`, and call `save` after each.

    No engine is started after `seconds`: those that are left out are named in the record.
    """
    begin = time.monotonic()
    found: dict[str, Any] = {"environment": environment(device), "skipped": [], "cases": {}}
    for case in cases:
        if only not in case.name:
            continue
        start = time.monotonic()
        if start - begin > seconds:
            found["skipped"].append(case.name)
            continue
        records, counts = run_engine(case)
        found["cases"] |= records
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # the next engine takes its share of the free memory
        print(f"{case.name}: {counts}, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        if save is not None:
            save(found)
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any], key: str = "hash") -> list[str]:
    """Return one line for each case that differs in `key` or is in one record alone."""
    skipped = tuple(f"{name}/" for name in (*old["skipped"], *new["skipped"]))
    lines = []
    for name in dict.fromkeys((*old["cases"], *new["cases"])):
        if name.startswith(skipped):
            continue
        before, after = old["cases"].get(name), new["cases"].get(name)
        if before is None or after is None:
            lines.append(f"{name}: only in the {'new' if before is None else 'old'} record")
        elif before[key] != after[key]:
            lines.append(
                f"{name}: {before['tokens']} {before['logprobs']} -> {after['tokens']} {after['logprobs']}"
            )
    return lines


def sources_commit() -> str:
    """Return the commit of the sources that were imported."""
    where = Path(draftproof.__file__).parent
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=where)
    return done.stdout.strip() or "unknown"


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a record as JSON with one line a case."""
    head = json.dumps({key: value for key, value in document.items() if key != "cases"}, indent=1)
    lines = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(value, separators=SEPARATORS)}"
        for key, value in document["cases"].items()
    )
    path.write_text(f'{head[:-2]},\n "cases": {{\n{lines}\n }}\n}}\n')


def main() -> None:
    """Parse the command line, record, write and compare."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--set", default="tiny", choices=("tiny", "tiny_full", "smollm2", "llama8b"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="smollm2-135m", help="of the set smollm2: name, folder or file")
    parser.add_argument("--layers", type=int, default=32, help="of the set llama8b")
    parser.add_argument("--only", default="", help="engines whose name contains this text")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="no engine is started after this time"
    )
    parser.add_argument(
        "--commit", default="", help="commit of the sources, if they are outside a repository"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="draftproof-bits-") as name:
        folder, device = Path(name), options.device
        cases = {
            "tiny": lambda: tiny(folder, device),
            "tiny_full": lambda: tiny(folder, device, is_full=True),
            "smollm2": lambda: smollm2(options.model, device),
            "llama8b": lambda: llama8b(folder, device, options.layers),
        }[options.set]()
        header = {"command": " ".join(["python", *sys.argv]), "commit": options.commit or sources_commit()}

        def save(found: dict[str, Any]) -> None:
            if options.out:
                write(options.out, {**header, **found})

        found = record(cases, device, options.seconds, options.only, save)
        save(found)
    print(f"{len(found['cases'])} cases recorded, {len(found['skipped'])} engines skipped")
    if options.compare:
        old = json.loads(options.compare.read_text())
        if old["environment"] != found["environment"]:
            print(f"recorded on another machine, bits may differ: {old['environment']}")
        lines = differences(old, found)
        print("\n".join([*lines, f"{len(lines)} of {len(found['cases'])} cases differ from {old['commit']}"]))
        sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
