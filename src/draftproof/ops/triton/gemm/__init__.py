"""Matrix product kernels, plain and fused, and their tile sizes."""
