"""GGUF files: header, dequantisation, mapping to model configurations."""
