"""Draftproof."""
