"""Model families: what config.json says, as data."""
