"""One worker per role."""
