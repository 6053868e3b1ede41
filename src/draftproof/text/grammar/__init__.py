"""Structured outputs: grammar compilation and token masks."""
