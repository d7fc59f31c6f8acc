"""Small applications that use fastapi_dedup, each with its tests in `tests/examples`."""
