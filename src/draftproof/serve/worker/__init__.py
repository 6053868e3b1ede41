"""Engine worker process: the engine loop, its connected HTTP processes, its entry point."""
