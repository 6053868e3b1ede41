"""Tensor parallelism on any backend: the communication between ranks, and linear layers that are cut."""
