"""Evaluation, load and fuzzing tools of other projects, unchanged, against `draftproof serve`.

lm-eval: log-likelihoods over HTTP (echo and logprobs, tokens by the server's /tokenize) equal those of `LLM`
in this process to the last digit, with speculation on and off; so do the generated texts. guidellm: a load
client. schemathesis: a fuzzer of /openapi.json. No dataset and no tokenizer is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from common.serving.server_process import NGRAM, Program, served

from draftproof import LLM, SamplingParams
from draftproof.text.tokenizer import Tokenizer

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance"
)
CHOICES: dict[str, list[tuple[str, str]]] = {
    "The capital of {} is": [
        ("France", "Paris"),
        ("Italy", "Rome"),
        ("Japan", "Tokyo"),
        ("Spain", "Madrid"),
        ("Egypt", "Cairo"),
        ("Russia", "Moscow"),
        ("Greece", "Athens"),
        ("Peru", "Lima"),
    ],
    "The opposite of {} is": [
        ("hot", "cold"),
        ("big", "small"),
        ("early", "late"),
        ("open", "closed"),
        ("light", "dark"),
        ("full", "empty"),
        ("old", "young"),
        ("wet", "dry"),
    ],
    "Question: Which animal says {}? Answer: the": [
        ("moo", "cow"),
        ("woof", "dog"),
        ("meow", "cat"),
        ("oink", "pig"),
        ("baa", "sheep"),
        ("neigh", "horse"),
        ("quack", "duck"),
        ("cluck", "hen"),
    ],
}
STARTS = (
    "Once upon a time",
    "Water boils at",
    "1, 2, 3, 1, 2, 3,",
    "A list of colours:\n- red\n-",
    "Größe und",
)
CHOICE_TASK = """task: own_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
START_TASK = """task: own_starts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 32, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def run(command: list[str], log: Path, work: Path) -> str:
    """Run a command; return its output, which is also written to `log`."""
    hidden = {str(work): "WORK", str(Path(command[0]).parent.parent.resolve()): "TOOL"}
    hidden |= {str(Path(command[0]).parent.parent): "TOOL", str(Path.home()): "~"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "COLUMNS": "160", "NO_COLOR": "1"}
    done = subprocess.run(
        command,
        cwd=work,  # some write files to the current folder
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": "", **offline},
    )
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout)
    kept = f"$ {Path(command[0]).name} {' '.join(command[1:])}\n{text}\nexit status {done.returncode}\n"
    for path, name in hidden.items():
        kept = kept.replace(path, name)
    log.write_text(kept)
    return text


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer in the format of transformers."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps({**facts, **tokenizer.special_tokens}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


# --- lm-eval ----------------------------------------------------------------------------------------------


def documents() -> list[dict[str, Any]]:
    """Return the multiple-choice questions."""
    made = []
    for text, pairs in CHOICES.items():
        for i, (what, right) in enumerate(pairs):
            others = [pairs[(i + k) % len(pairs)][1] for k in range(1, 4)]
            choices = sorted([right, *others])
            made.append({"text": text.format(what), "choices": choices, "answer": choices.index(right)})
    return made


def write_tasks(folder: Path) -> None:
    """Write the tasks of lm-eval and their data."""
    for name, task, lines in (
        ("choices", CHOICE_TASK, documents()),
        ("starts", START_TASK, [{"text": text} for text in STARTS]),
    ):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / f"{name}.yaml").write_text(task.format(data=data))


def offline(llm: LLM) -> tuple[list[list[tuple[float, bool]]], list[str]]:
    """Return the expected results of lm-eval: sums of log-likelihoods, whether greedy, and texts."""
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    sums = []
    for line in documents():
        length = len(tokenizer.encode(line["text"]))
        row = []
        for choice in line["choices"]:
            ids = tokenizer.encode(f"{line['text']} {choice}")
            rows = llm.generate([{"prompt_token_ids": ids}], params)[0].prompt_logprobs
            assert rows is not None
            pairs = [(rows[i][ids[i]], rows[i]) for i in range(length, len(ids))]  # type: ignore[index]
            greedy = all(own.logprob == max(o.logprob for o in row.values()) for own, row in pairs)
            row.append((sum(own.logprob for own, _ in pairs), greedy))
        sums.append(row)
    end = tokenizer.special_tokens["eos_token"]
    until = SamplingParams(temperature=0, max_tokens=32, stop=["\n\n", end])
    return sums, [llm.generate([text], until)[0].outputs[0].text for text in STARTS]


def lm_eval(program: Program, model_name: str, bin_folder: Path, work: Path, log: Path) -> dict[str, Any]:
    """Run lm-eval and return its results."""
    out = work / f"out-{log.stem}"
    model = {
        "model": model_name,
        "base_url": f"{program.url}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 4,
        "max_retries": 1,
        "max_length": 2048,
    }
    command = [str(bin_folder / "lm_eval"), "run", "--model", "local-completions", "--model_args"]
    command += [",".join(f"{key}={value}" for key, value in model.items()), "--batch_size", "4"]
    command += ["--tasks", "own_choices,own_starts", "--include_path", str(work)]
    command += ["--output_path", str(out), "--log_samples"]
    run(command, log, work)
    samples: dict[str, list[Any]] = {}
    for name in ("own_choices", "own_starts"):
        paths = sorted(out.rglob(f"samples_{name}_*.jsonl"))
        if not paths:
            raise SystemExit(f"lm-eval wrote no samples: see {log}")
        lines = [json.loads(line) for line in paths[-1].read_text().splitlines()]
        samples[name] = [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    found = json.loads(sorted(out.rglob("results_*.json"))[-1].read_text())
    choices = samples["own_choices"]
    return {
        "accuracy": found["results"]["own_choices"]["acc,none"],
        "sums": [[(float(r), greedy in (True, "True")) for [[r, greedy]] in row] for row in choices],
        "texts": [row[0][0] for row in samples["own_starts"]],
    }


# --- load and fuzzing -------------------------------------------------------------------------------------


def guidellm(program: Program, bin_folder: Path, work: Path, log: Path, requests: int) -> dict[str, Any]:
    """Run guidellm and return its figures."""
    out = work / "guidellm.json"
    command = [str(bin_folder / "guidellm"), "benchmark", "run", "--target", program.url]
    command += ["--rate-type", "concurrent", "--rate", "1,8", "--max-requests", str(requests)]
    command += ["--data", "prompt_tokens=64,output_tokens=48", "--processor", str(work)]
    command += ["--output-path", str(out), "--disable-progress"]
    run(command, log, work)
    figures = []
    for each in json.loads(out.read_text())["benchmarks"]:
        metrics = each["metrics"]
        middle = {name: metrics[name]["successful"]["median"] for name in metrics if name.endswith("_ms")}
        rate = metrics["output_tokens_per_second"]["successful"]["mean"]
        total = each.get("request_totals") or each["run_stats"]["requests_made"]
        strategy = each["args"]["strategy"]
        facts = {"streams": strategy.get("streams"), "requests": total, "output_tokens_per_second": rate}
        figures.append({**facts, "medians": middle})
    good = all(f["requests"]["errored"] == 0 and f["requests"]["successful"] > 0 for f in figures)
    return {"passed": good, "runs": figures}


def schemathesis(
    program: Program, bin_folder: Path, work: Path, log: Path, examples: int, seconds: int
) -> dict[str, Any]:
    """Run schemathesis and return its result."""
    command = [str(bin_folder / "schemathesis"), "run", f"{program.url}/openapi.json", "--checks", CHECKS]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(examples), "--seed", "5"]
    command += ["--continue-on-failure", "--request-timeout", "120", "--max-time", str(seconds)]
    command += ["--suppress-health-check", "all", "--no-shrink"]
    began = time.monotonic()
    text = run(command, log, work)
    cases = re.search(r"(\d+) generated", text)
    return {
        "passed": log.read_text().endswith("exit status 0\n"),
        "cases": int(cases[1]) if cases else None,
        "seconds": round(time.monotonic() - began, 1),
        "summary": text.strip().splitlines()[-6:],
    }


def compare_lm_eval(options: Namespace, bin_folder: Path, work: Path) -> dict[str, Any]:
    """Compare lm-eval's results with and without speculation with those of `LLM` in this process."""
    write_tasks(work)
    with LLM(options.model) as llm:
        expected = offline(llm)
    found = {}
    for side, config in (("speculation", NGRAM), ("plain", "off")):
        with served(options.model, "--speculative-config", config) as program:
            log = options.results / f"lm_eval_{side}.txt"
            found[side] = lm_eval(program, options.model, bin_folder, work, log)
    equal = {side: (each["sums"], each["texts"]) == expected for side, each in found.items()}
    same = found["speculation"] == found["plain"]
    return {
        "passed": same and all(equal.values()),
        "log_likelihoods": sum(map(len, expected[0])),
        "equal_offline": equal,
        "equal_with_speculation": same,
        "accuracy": found["plain"]["accuracy"],
    }


def run_tool(name: str, options: Namespace, bin_folder: Path) -> dict[str, Any]:
    """Run one tool against a server of its own and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if name == "lm_eval":
            return compare_lm_eval(options, bin_folder, work)
        log = options.results / f"{name}.txt"
        if name == "guidellm":
            with LLM(options.model) as llm:
                write_tokenizer(llm.get_tokenizer(), work)
            with served(options.model, "--speculative-config", NGRAM) as program:
                return guidellm(program, bin_folder, work, log, options.requests)
        short = ("--max-model-len", "64", "--max-n", "2", "--speculative-config", NGRAM)
        with served(options.model, *short) as program:
            return schemathesis(program, bin_folder, work, log, options.examples, options.fuzz_seconds)
