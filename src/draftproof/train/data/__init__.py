"""Training data: generated text, shards, hidden states."""
