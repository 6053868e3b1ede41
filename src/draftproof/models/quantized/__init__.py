"""Quantised checkpoints of other tools: their configuration, their layouts, and a writer."""
