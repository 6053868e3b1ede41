"""Tiny LLM whose tokens are pieces of one to three characters."""

import json

from draftproof import LLM

PIECES = [b"a", b"b", b"ab", b"ba", b"abb", b"\xc3", b"\xa9", b"\xc3\xa9b", b" ", b"b a"]
FIRST = 10  # ids 10 to 19 are the pieces; 2 ends a text
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


class Pieces:
    """Minimal tokenizer for LLM."""

    eos_token_ids = (2,)
    special_ids = frozenset({2})
    strip_left = 0

    def token_bytes(self, token_id):
        return PIECES[token_id - FIRST] if 0 <= token_id - FIRST < len(PIECES) else b"?"

    def token_text(self, token_id):
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def encode(self, text, add_special_tokens=True):
        return [FIRST + PIECES.index(char.encode()) for char in text]


class Always(dict):
    """Mapping with one value for every request id."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def get(self, key, default=None):
        return self.answer


def make_llm(folder, spec, **options):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    options = {"load_format": "dummy", "dtype": "float32", "debug": True, **options}
    llm = LLM(str(folder), speculative_config=spec, **options)
    llm.tokenizer = Pieces()
    return llm


def output_fields(output):
    """Return the fields of an output that drafts must not change."""
    names = ("text", "token_ids", "logprobs", "cumulative_logprob", "text_offsets", "finish_reason")
    return tuple(getattr(output, name) for name in (*names, "stop_reason", "error"))
