"""Sequential tests with e-values. Numpy alone, no HTTP."""
