"""Engine: scheduling, steps, commits and results, in token ids."""
