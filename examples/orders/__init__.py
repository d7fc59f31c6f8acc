"""A shop that takes orders: `app.py` is the service, `demo.py` sends it what clients send in earnest."""
