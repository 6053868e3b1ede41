"""Text processing: tokenizers, chat templates, detokenizers, stop strings, grammars."""
