"""Matrix products on the CPU, one module per instruction set and weight type."""
