"""Reasoning in generated text: markers of the models, splitting into reasoning and content, token budget."""
