"""Many claims in few statements: what each kind of database has for that."""
