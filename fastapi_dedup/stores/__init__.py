"""Where claims live: stores that keep the `fastapi_dedup.core.Store` protocol."""
