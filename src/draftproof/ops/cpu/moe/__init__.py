"""Mixtures of experts on the CPU."""
