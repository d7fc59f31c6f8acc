"""A nightly job that several schedulers publish (`agent.py`) and that is run once (`worker.py`)."""
