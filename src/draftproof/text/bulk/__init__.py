"""Columnar construction of outputs that are not streamed."""
