"""Sampling on the CPU: ops, kernels, row selection, keyed noise."""
