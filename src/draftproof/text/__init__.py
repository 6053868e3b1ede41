"""Text: tokenizers, chat templates, detokenising, stop strings."""
