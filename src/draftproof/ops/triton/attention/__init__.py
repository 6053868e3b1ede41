"""Paged attention kernels and their work lists."""
