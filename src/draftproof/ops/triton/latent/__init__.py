"""Latent attention (MLA): ops, kernels around the attention, and the attention itself."""
