"""What each kind of database does in its own way."""
