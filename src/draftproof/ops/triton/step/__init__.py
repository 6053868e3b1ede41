"""Kernels of a decode step: layout, commit and the write of drafts."""
