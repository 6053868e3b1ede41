"""All layers of a mixture of experts in one kernel, for one row, on Hopper."""
