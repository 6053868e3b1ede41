"""Stub servers with a small language model: honest ones, and ones with a planted fault."""
