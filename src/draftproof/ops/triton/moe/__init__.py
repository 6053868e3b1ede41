"""Mixture of experts: routing, grouped GEMM over the experts, and the weighted sum of their outputs."""
