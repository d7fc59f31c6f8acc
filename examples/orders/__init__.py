"""A shop: `app.py` takes orders over HTTP, `consumer.py` from a queue; `demo.py` sends some in earnest."""
