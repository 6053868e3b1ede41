"""HTTP server: ASGI app, connections, streaming, limits, errors."""
