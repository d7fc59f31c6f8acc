"""The HTTP doors: a FastAPI dependency and a pure ASGI middleware, over the core."""
