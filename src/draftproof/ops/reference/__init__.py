"""Definition of every op in plain loops; all other backends are tested against it."""
