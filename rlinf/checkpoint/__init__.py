"""Atomic commits of everything a run needs."""
