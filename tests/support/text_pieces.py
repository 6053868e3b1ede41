"""A vocabulary of ten text pieces, and a model configuration for it."""

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


def seen(output):
    """Return all fields of an output but its provenance."""
    return (
        output.text,
        output.token_ids,
        output.logprobs,
        output.cumulative_logprob,
        output.text_offsets,
        output.finish_reason,
        output.stop_reason,
        output.error,
    )
