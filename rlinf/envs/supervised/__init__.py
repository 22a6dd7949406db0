"""Simulators in processes that are watched, and replaced when they crash or hang."""
