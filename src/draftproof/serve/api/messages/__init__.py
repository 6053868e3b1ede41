"""Anthropic's Messages API, translated to chat requests."""
