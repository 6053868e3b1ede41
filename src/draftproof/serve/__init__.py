"""The server: HTTP on one side, an engine in a process of its own on the other, and the wire between them."""
