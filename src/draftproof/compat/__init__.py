"""Options of other engines: those that are mapped or accepted, and the reason why others are refused."""
