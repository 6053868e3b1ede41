"""Parts that kernels share which run all layers of a model on one row."""
