"""Shared parts of test_launches and the tests that reuse them."""

from __future__ import annotations


class Chip:
    multi_processor_count = 132
    shared_memory_per_block_optin = 227 << 10
    shared_memory_per_multiprocessor = 228 << 10
    major = 9
