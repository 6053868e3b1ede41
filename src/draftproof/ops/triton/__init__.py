"""CUDA backend: Triton kernels, CUDA graphs and cuBLAS where its bits are the same."""
