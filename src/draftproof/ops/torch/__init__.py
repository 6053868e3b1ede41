"""Portable backend on plain PyTorch."""
