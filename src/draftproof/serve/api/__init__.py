"""OpenAI-compatible API: request and response schemas and their handlers."""
