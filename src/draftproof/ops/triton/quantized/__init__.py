"""GEMM with quantised weights, and rows of activations quantised for it."""
