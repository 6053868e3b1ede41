"""Kernels of a decode step: layout, penalties, sampling, commit, logprobs, n-gram search."""
