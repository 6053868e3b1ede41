"""Draft policy and proposers as the engine runs them."""
