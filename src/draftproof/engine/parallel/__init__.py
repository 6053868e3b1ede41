"""Tensor parallelism: rank 0 is the engine, other ranks are processes that run its forward passes with it."""
