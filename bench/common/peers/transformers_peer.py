"""Comparison with `transformers` on the same weights in the same run."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from draftproof import LLM, SamplingParams
from draftproof.models.load import load_checkpoint


def load_peer(model: str, dtype: torch.dtype, device: str, **options: Any) -> Any:
    """Return a `transformers` model with the weights of `model`."""
    import transformers

    transformers.logging.set_verbosity_error()
    made = load_checkpoint(model, dtype="bfloat16", **options)
    c = made.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        max_position_embeddings=c.max_position,
        tie_word_embeddings=c.tie_embeddings,
    )
    peer = transformers.LlamaForCausalLM(config).to(dtype).eval()
    peer.load_state_dict({name: tensor.to(dtype) for name, tensor in made.tensors.items()}, strict=False)
    return peer.to(device)


def prompt_logprobs(peer: Any, ids: list[int]) -> Tensor:
    """Return the logprob of each prompt token after the first."""
    with torch.inference_mode():
        tokens = torch.tensor([ids], device=peer.device)
        logprobs = torch.log_softmax(peer(tokens).logits[0].float(), -1)
        return logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0].cpu()


def rate(peer: Any, ids: list[int], tokens: int) -> float:
    """Return tokens a second of greedy decoding, prefill included."""
    begin = time.perf_counter()
    with torch.inference_mode():
        peer.generate(
            torch.tensor([ids], device=peer.device),
            attention_mask=torch.ones((1, len(ids)), dtype=torch.long, device=peer.device),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
    return tokens / (time.perf_counter() - begin)


def side_by_side(llm: LLM, prompts: list[list[int]], tokens: int, **options: Any) -> dict[str, Any]:
    """Return speeds at batch 1, and errors of prompt logprobs in bf16 against `transformers` in fp32."""
    device = str(llm.engine.ops.device)
    model = llm.config.model
    truth = load_peer(model, torch.float32, device, **options)
    want = [prompt_logprobs(truth, ids) for ids in prompts]
    del truth
    peer = load_peer(model, torch.bfloat16, device, **options)
    theirs = [prompt_logprobs(peer, ids) for ids in prompts]
    scored = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    ours = [
        torch.tensor(
            [
                line[token].logprob
                for token, line in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:], strict=True)
            ]
        )
        for o in scored
    ]
    plain = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculative=False)
    found: dict[str, Any] = {"prompt tokens": sum(map(len, want))}
    for name, side in (("ours", ours), ("transformers", theirs)):
        errors = torch.cat([(a - b).abs() for a, b in zip(side, want, strict=True)])
        found[f"{name} bf16: mean and largest error of a logprob"] = [
            round(float(errors.mean()), 5), round(float(errors.max()), 4)
        ]  # fmt: skip
    rate(peer, prompts[0], 16)
    speeds: dict[str, list[float]] = {"transformers tok/s": [], "ours tok/s": []}
    for _ in range(3):
        speeds["transformers tok/s"].append(round(rate(peer, prompts[0], tokens), 1))
        begin = time.perf_counter()
        llm.generate([prompts[0]], plain, use_tqdm=False)
        speeds["ours tok/s"].append(round(tokens / (time.perf_counter() - begin), 1))
    print(found, speeds, flush=True)
    return {**found, **speeds}
