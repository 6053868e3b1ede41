"""All layers of a dense model in one kernel, for one row, on Hopper."""
