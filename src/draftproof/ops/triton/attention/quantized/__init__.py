"""Attention of quantised KV with kernels of its own."""
