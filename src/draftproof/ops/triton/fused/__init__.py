"""Optional accelerator: all layers of a small model in one cooperative kernel."""
