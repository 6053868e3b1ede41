"""KV events: changes of the prefix cache, published for routers in vLLM's format."""
