"""CPU backend: numba kernels on a thread pool."""
