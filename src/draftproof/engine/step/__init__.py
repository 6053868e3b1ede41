"""Device program of one step and the results it returns."""
