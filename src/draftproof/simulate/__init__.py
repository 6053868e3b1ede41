"""Simulation: recorded outputs are replayed with a real proposer and no model."""
