"""Sampling kernels: noise, argmax, top-k, top-p."""
