"""Tensor parallelism: drafts, chunks and batches change no bit, nor does the number of ranks if invariant."""

import os
import signal
import subprocess
from functools import cache

import pytest
import torch

import heads
import tiny
from draftproof import LLM, SamplingParams
from draftproof.errors import ConfigError, EngineDeadError
from draftproof.models.weights.sharding import Sharding
from draftproof.ops.parallel import communicator as processes
from draftproof.ops.parallel import forward
from exact import NEIGHBOURS, Batch, Case, Setup, reference_run
from rank_threads import rank_threads

CASES = (Case(7, "sampled_logprob", 0.7, length=40), *NEIGHBOURS[:4])


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


def outputs(setup, speculative=None, chunk=16):
    batch = Batch(CASES, setup, speculative, chunk=chunk, arrivals=[0, 0, 2, 5, 5])
    answers = {str(case.index): reference_run(case, setup).token_ids for case in CASES}
    records = batch.serve(answers)
    batch.engine.close()
    return {name: record.same() for name, record in records.items()}


@cache
def one_rank(arch, dtype):
    """Return the outputs of the requests with one rank, each alone, without drafts."""
    setup = Ranks(arch, 1, dtype=dtype)
    return {str(case.index): reference_run(case, setup).same() for case in CASES}


def options_of(method, arch="llama", dtype="float32"):
    spec = {"method": method, "num_speculative_tokens": 3}
    return {**spec, **heads.options(method, arch, dtype)}


def can_be_cut(arch):
    made = tiny.checkpoint(arch)
    try:
        Sharding(made.config, 0, 2, invariant=True).cut(dict(made.weights), made.dtype)
    except ConfigError:
        assert arch not in ("llama", "llama3", "smollm2", "mistral", "qwen2", "qwen3", "ernie4_5")
        return False
    return True


@pytest.mark.parametrize("arch", list(filter(can_be_cut, tiny.ARCHITECTURES)))
def test_two_ranks_give_the_bits_of_one(arch):
    assert outputs(Ranks(arch, 2), options_of("ngram")) == one_rank(arch, "float32")


@pytest.mark.parametrize("size", [2, 4])
def test_heads_that_the_ranks_do_not_divide_give_the_bits_of_one(size, monkeypatch):
    shape = {"num_heads": 9, "num_kv_heads": 3, "tie_embeddings": True}  # as SmolLM2-135M
    arch = {"architecture": "LlamaForCausalLM", **shape}
    monkeypatch.setitem(tiny.ARCHITECTURES, "nine_heads", arch)
    assert outputs(Ranks("nine_heads", size, dtype="bfloat16")) == one_rank("nine_heads", "bfloat16")


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantised_weights_give_the_bits_of_one_rank(quantization):
    alone = outputs(Ranks("llama", 1, quantization=quantization))
    assert outputs(Ranks("llama", 2, quantization=quantization), options_of("ngram")) == alone


@pytest.mark.parametrize("method", ["eagle3", "hybrid", "draft_model", "given"])
def test_drafts_change_no_bit_with_two_ranks(method):
    setup = Ranks("qwen3", 2, invariant=False, dtype="bfloat16")
    batch = Batch(CASES, setup, options_of(method, "qwen3", "bfloat16"), chunk=16, arrivals=[0, 0, 2, 5, 5])
    assert not batch.differences()
    assert any(step.num_draft for record in batch.records.values() for step in record.steps)
    batch.engine.close()


def test_control_of_another_order_of_addition(monkeypatch):
    whole = forward.pairwise_sum
    monkeypatch.setattr(forward, "pairwise_sum", lambda terms: whole(list(terms)[1:] + list(terms)[:1]))
    shuffled = outputs(Ranks("llama", 4))
    assert shuffled != one_rank("llama", "float32")


def test_control_of_ranks_that_compute_without_the_option():
    assert outputs(Ranks("llama", 2, invariant=False)) != one_rank("llama", "float32")


# --- processes ----------------------------------------------------------------------------------------


def rank_pids(parent: int) -> list[int]:
    """Return the processes of ranks that a process started."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True)
    lines = [line.split(maxsplit=1) for line in found.stdout.splitlines()]
    return [int(pid) for pid, command in lines if "parallel.follower" in command]


def test_killed_rank_ends_the_engine_with_the_reason(tmp_path):
    """Two processes give the bits of one; after SIGKILL in mid-stream every request fails, none is left."""
    made = tiny.checkpoint("llama")
    heads.write_model(tmp_path, made.config, made.tensors)
    options = {"device": "cpu", "skip_tokenizer_init": True, "tp_invariant": True, "max_num_seqs": 4}
    prompt = {"prompt_token_ids": tiny.prompt(1, 20)}
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3, logprobs=2, ignore_eos=True)
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(str(tmp_path), **options) as llm:
        alone = llm.generate(prompt, params)[0].outputs[0]
    with LLM(str(tmp_path), tensor_parallel_size=2, speculative_config=spec, **options) as llm:
        (pid,) = rank_pids(os.getpid())
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
