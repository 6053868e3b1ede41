"""Request handling between the public API and the engine; free of torch."""
