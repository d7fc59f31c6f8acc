"""A shop that takes orders: `app.py` is the service, `consumer.py` takes them from a queue too, `demo.py` sends some."""
