"""Tensor parallelism: drafts, chunks and batches change no bit, nor does the number of ranks if invariant."""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import heads
import tiny
from draftproof import LLM, SamplingParams
from draftproof.engine.parallel.rank_folder import RankFolder
from draftproof.errors import ConfigError, EngineDeadError
from draftproof.models.load import load_checkpoint
from draftproof.ops.parallel import communicator as processes
from draftproof.ops.parallel import forward
from exact import NEIGHBOURS, Batch, Case, Setup, bits
from gguf_files import write_gguf
from rank_threads import rank_threads

MAX_TOKENS = 8
CASES = [
    replace(case, max_tokens=MAX_TOKENS)
    for case in (Case(7, "sampled_logprob", 0.7, length=40), *NEIGHBOURS[:2])
]
ARRIVALS = [0, 0, 2]


class Ranks(Setup):
    """Setup of engines with a number of ranks."""

    def __init__(self, arch="llama", size=2, invariant=True, **fields):
        super().__init__(arch, **fields)
        object.__setattr__(self, "options", {"tensor_parallel_size": size, "tp_invariant": invariant})

    def __hash__(self):
        return hash((super().__hash__(), *self.options.items()))

    def __eq__(self, other):
        return super().__eq__(other) and self.options == other.options

    def engine(self, speculative=None, **options):
        with rank_threads(self.dtype):
            return super().engine(speculative, **self.options, **options)


def same(records):
    """Return the tokens and the bits of the logprobs of requests."""
    return {
        name: (record.token_ids, bits(record.logprobs), bits(record.prompt_logprobs), record.finish)
        for name, record in records.items()
    }


def alone(setup):
    """Return the outputs of the requests, one after another, without drafts."""
    engine, found = setup.engine(), {}
    for case in CASES:
        found |= tiny.run(engine, [case.request(plain=True)])
    engine.close()
    return same(found)


def together(setup, speculative):
    """Return the outputs of the requests in one batch, in chunks, with drafts."""
    batch = Batch(CASES, setup, speculative, chunk=16, arrivals=ARRIVALS)
    records = batch.serve({})
    assert any(step.num_draft for record in records.values() for step in record.steps)
    batch.engine.close()
    return same(records)


def options_of(method, arch="llama", dtype="float32"):
    spec = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        spec |= {"prompt_lookup_min": 1, "adaptive": False}  # drafts in every family
    return {**spec, **heads.options(method, arch, dtype)}


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
def test_two_and_four_ranks_give_the_bits_of_one(arch):
    """Use four ranks, and two with weights of every kind: dense, experts, latent attention, biases."""
    one = alone(Ranks(arch, 1))
    for size in (2, 4) if arch in ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss") else (4,):
        assert together(Ranks(arch, size), options_of("ngram")) == one


@pytest.mark.parametrize("size", [2, 4])
def test_heads_that_the_ranks_do_not_divide_give_the_bits_of_one(size, monkeypatch):
    shape = {"num_heads": 9, "num_kv_heads": 3, "tie_embeddings": True}  # as SmolLM2-135M
    monkeypatch.setitem(tiny.ARCHITECTURES, "nine_heads", {"architecture": "LlamaForCausalLM", **shape})
    one = alone(Ranks("nine_heads", 1, dtype="bfloat16"))
    assert together(Ranks("nine_heads", size, dtype="bfloat16"), options_of("ngram")) == one


WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 256}  # every cut is at a whole block of 32


@pytest.mark.parametrize(
    ("quantization", "arch", "kv"),
    [("int8", "qwen3_moe", "auto"), ("fp8", "deepseek_v3", "auto"), ("int4", "wide", "int8")],
)
def test_quantised_weights_give_the_bits_of_one_rank(quantization, arch, kv, monkeypatch):
    monkeypatch.setitem(tiny.ARCHITECTURES, "wide", {"architecture": "LlamaForCausalLM", **WIDE})
    fields = {"quantization": quantization, "kv_cache_dtype": kv}
    assert together(Ranks(arch, 2, **fields), options_of("ngram")) == alone(Ranks(arch, 1, **fields))


def test_blocks_of_a_file_give_the_bits_of_one_rank(tmp_path, monkeypatch):
    """Parts of weights are not mixed up with whole ones in the cache of packed weights."""
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", replace(tiny.model_config("llama"), **WIDE), kind="Q8_0")
    prompt = {"prompt_token_ids": tiny.prompt(1, 20)}
    params = SamplingParams(max_tokens=4, temperature=0.7, seed=3, logprobs=2, ignore_eos=True)

    def outputs(**options):
        load = partial(load_checkpoint, path, keep_blocks=True, converts=False)
        sizes = {"max_num_seqs": 2, "kv_cache_tokens": 256, "skip_tokenizer_init": True, "device": "cpu"}
        with rank_threads(load=load), LLM(str(path), **sizes, **options) as llm:
            found = llm.generate(prompt, params)[0].outputs[0]
            return found.token_ids, found.logprobs

    two = outputs(tensor_parallel_size=2, tp_invariant=True)
    outputs()  # writes the cache
    assert outputs(tensor_parallel_size=2, tp_invariant=True) == two == outputs(tp_invariant=True)


@pytest.mark.parametrize(
    ("method", "arch"),
    [("eagle3", "qwen3_moe"), ("hybrid", "deepseek_v3"), ("draft_model", "olmo2")],
)
def test_drafts_change_no_bit_with_two_ranks(method, arch):
    """Drafts of heads, MTP and draft models, which run on rank 0; sums are not invariant."""
    setup = Ranks(arch, 2, invariant=False, dtype="bfloat16")
    assert together(setup, options_of(method, arch, "bfloat16")) == alone(setup)


@pytest.mark.control
def test_control_of_another_order_of_addition(monkeypatch):
    """An all-reduce in the order of arrival: another rank's sum comes first."""
    whole = forward.pairwise_sum
    monkeypatch.setattr(forward, "pairwise_sum", lambda terms: whole(list(terms)[1:] + list(terms)[:1]))
    shuffled = together(Ranks("llama", 4), options_of("ngram"))
    monkeypatch.undo()
    assert shuffled != alone(Ranks("llama", 1))


@pytest.mark.control
def test_control_of_experts_in_the_order_of_ranks(monkeypatch):
    """Experts of a row are added as the ranks come, not in the order of the row."""
    whole = forward.ParallelForward.expert_outputs

    def by_rank(self, x, moe):
        found = whole(self, x, moe)
        order = found.experts.argsort(1)
        values = found.values.view(*order.shape, -1)
        values = values.gather(1, order[..., None].expand_as(values)).flatten(0, 1)
        return replace(found, values=values, weights=found.weights.gather(1, order))

    one = alone(Ranks("qwen3_moe", 1))
    monkeypatch.setattr(forward.ParallelForward, "expert_outputs", by_rank)
    assert together(Ranks("qwen3_moe", 2), options_of("ngram")) != one


@pytest.mark.control
def test_control_of_ranks_that_compute_without_the_option():
    assert together(Ranks("llama", 2, invariant=False), options_of("ngram")) != alone(Ranks("llama", 1))


# --- processes ----------------------------------------------------------------------------------------


def rank_pids(parent: int) -> list[int]:
    """Return the processes of ranks that a process started."""
    found = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True
    )
    lines = [line.split(maxsplit=1) for line in found.stdout.splitlines()]
    return [int(pid) for pid, command in lines if "parallel.follower" in command]


def test_killed_rank_ends_the_engine_with_the_reason(tmp_path):
    """Two processes give the bits of one, after a sleep too; SIGKILL in mid-stream fails every request."""
    made = tiny.checkpoint("llama")
    heads.write_model(tmp_path, made.config, made.tensors)
    options = {"device": "cpu", "skip_tokenizer_init": True, "tp_invariant": True, "max_num_seqs": 4}
    options["enable_sleep_mode"] = True
    prompt = {"prompt_token_ids": tiny.prompt(1, 20)}
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3, logprobs=2, ignore_eos=True)
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(str(tmp_path), **options) as llm:
        alone = llm.generate(prompt, params)[0].outputs[0]
    with LLM(str(tmp_path), tensor_parallel_size=2, speculative_config=spec, **options) as llm:
        (pid,) = rank_pids(os.getpid())
        output = llm.generate(prompt, params)[0].outputs[0]
        assert (output.token_ids, output.logprobs) == (alone.token_ids, alone.logprobs)
        llm.sleep(level=2)
        llm.wake_up()  # every rank reads its part again
        output = llm.generate(prompt, params)[0].outputs[0]
        assert (output.token_ids, output.logprobs) == (alone.token_ids, alone.logprobs)
        stream = llm.stream(prompt, SamplingParams(max_tokens=200, ignore_eos=True))
        assert next(stream)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 1 ended: killed by SIGKILL"):
            list(stream)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate(prompt, params)
    assert not rank_pids(os.getpid())


def test_folder_of_a_killed_engine_is_removed_at_the_next_start(tmp_path, monkeypatch):
    """Check that folders of running engines, this one's among them, stay."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = (
        "import time; from draftproof.engine.parallel.rank_folder import RankFolder; folder = RankFolder()\n"
        "print(folder.path, flush=True); time.sleep(600)"
    )
    others = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    killed, running = (Path(other.stdout.readline().decode().strip()) for other in others)
    try:
        others[0].kill()
        others[0].wait()
        assert {killed, running} == set(tmp_path.iterdir())
        own, second = RankFolder(), RankFolder()
        assert {running, own.path, second.path} == set(tmp_path.iterdir())
        own.remove()
        second.remove()
        assert [running] == list(tmp_path.iterdir())
    finally:
        for other in others:
            other.kill()
            other.wait()
            other.stdout.close()


def test_refused_options_start_no_process(tmp_path):
    made = tiny.checkpoint("llama")
    heads.write_model(tmp_path, made.config, made.tensors)
    for options, reason in (
        ({"tensor_parallel_size": 5}, "possible sizes: 1, 2, 3, 4"),
        ({"tensor_parallel_size": 3, "tp_invariant": True}, "1, 2, 4 and 8 ranks"),
        ({"tensor_parallel_size": 0}, "positive integer"),
    ):
        with pytest.raises(ConfigError, match=reason):
            LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True, **options)
    assert not rank_pids(os.getpid())


def test_devices_that_are_missing_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="needs 2 GPUs from cuda on, and this machine has 1"):
        processes.rank_device(torch.device("cuda"), 0, 2)
