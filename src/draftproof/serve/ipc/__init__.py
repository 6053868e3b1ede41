"""Messages between HTTP processes and the engine worker process."""
