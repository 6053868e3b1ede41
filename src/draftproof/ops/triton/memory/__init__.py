"""Device memory that is released and mapped again at the same addresses."""
