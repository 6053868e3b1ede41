"""Draft heads: configuration, checkpoint formats, forward pass, bundled heads."""
