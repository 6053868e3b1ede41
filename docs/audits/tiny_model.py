"""Write one tiny random Llama and a draft as GGUF files and Hugging Face folders, with a real tokenizer.

    python tiny_model.py SmolLM2.gguf OUT_FOLDER

The tokenizer is the beginning of SmolLM2's: its special tokens, the 256 bytes and the first merges. The
weights are random and peaked: the next token depends mostly on the current one, so outputs repeat and
n-gram drafts are accepted. Tokens that are parts of characters have no probability. The draft has the same weights with noise.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter, TokenType
from safetensors.numpy import save_file

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD, CONTEXT = 64, 128, 2, 4, 2, 16, 8192
VOCAB = 1024
LOGIT_STD, DRAFT_NOISE = 6.0, 0.25


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    def random(*shape: int, std: float) -> np.ndarray:
        return (std * rng.standard_normal(shape)).astype(np.float32)

    found = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN, std=1.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": random(VOCAB, HIDDEN, std=LOGIT_STD / HIDDEN**0.5),
    }
    for i in range(LAYERS):
        sizes = {
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        for name, shape in sizes.items():
            scale = 0.4 if name.endswith(("o_proj", "down_proj")) else 1.0
            found[f"model.layers.{i}.{name}.weight"] = random(*shape, std=scale / shape[1] ** 0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return found


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return q or k with rotary pairs side by side, as GGUF files have them."""
    return weight.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, tensors: dict[str, np.ndarray], tokenizer: dict) -> None:
    w = GGUFWriter(path, "llama")
    w.add_block_count(LAYERS), w.add_context_length(CONTEXT), w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(FFN), w.add_head_count(HEADS), w.add_head_count_kv(KV_HEADS)
    w.add_rope_dimension_count(HEAD), w.add_rope_freq_base(10000.0), w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(VOCAB), w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("smollm")
    w.add_token_list(tokenizer["tokens"]), w.add_token_types(tokenizer["types"])
    (
        w.add_token_merges(tokenizer["merges"]),
        w.add_eos_token_id(2),
        w.add_bos_token_id(1),
        w.add_add_bos_token(False),
    )
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, value in tensors.items():
        base = name.removesuffix(".weight")
        if base in fixed:
            stored = fixed[base]
        else:
            _, _, i, rest = base.split(".", 3)
            stored = f"blk.{i}.{NAMES[rest]}"
            if rest.endswith("q_proj"):
                value = pairs(value, HEADS)
            if rest.endswith("k_proj"):
                value = pairs(value, KV_HEADS)
        w.add_tensor(stored + ".weight", np.ascontiguousarray(value))
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()


def write_folder(folder: Path, tensors: dict[str, np.ndarray], tokenizer: dict) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    special = [
        {
            "id": i,
            "content": t,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, (t, kind) in enumerate(zip(tokenizer["tokens"], tokenizer["types"], strict=True))
        if kind == TokenType.CONTROL
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    data = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]},
        "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokenizer["tokens"])},
            "merges": [merge.split(" ") for merge in tokenizer["merges"]],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
             "model_max_length": CONTEXT, "chat_template": template}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def main() -> None:
    source, out = GGUFReader(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(exist_ok=True)
    fields = {
        name: source.fields[f"tokenizer.ggml.{name}"].contents()
        for name in ("tokens", "merges", "token_type")
    }
    tokens, kinds = fields["tokens"][:VOCAB], fields["token_type"][:VOCAB]
    known = set(tokens)
    merges = [m for m in fields["merges"] if "".join(m.split(" ")) in known and set(m.split(" ")) <= known]
    tokenizer = {"tokens": tokens, "types": kinds, "merges": merges}
    rng = np.random.default_rng(7)
    tensors = weights(rng)
    for i, token in enumerate(tokens):  # logit 0: parts of characters and special tokens are not sampled
        if not all(c.isascii() and c.isprintable() or c in "\u0120\u010a" for c in token) or (
            i < 17 and i != 2
        ):
            tensors["lm_head.weight"][i] = 0
    write_gguf(out / "tiny.gguf", tensors, tokenizer)
    write_folder(out / "tiny", tensors, tokenizer)
    noisy = {k: v if v.ndim == 1 else v + DRAFT_NOISE * v.std() * rng.standard_normal(v.shape).astype(np.float32)
             for k, v in tensors.items()}  # fmt: skip
    write_gguf(out / "draft.gguf", noisy, tokenizer)
    write_folder(out / "draft", noisy, tokenizer)
    print(len(tokens), "tokens", len(merges), "merges", tokens[:4], tokens[20:24], tokens[-3:])


main()
