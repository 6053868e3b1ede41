"""Makes a draft head: text from the model itself, its features, an unrolled loss, a checkpoint."""
