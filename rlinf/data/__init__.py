"""Trajectories, evaluation specifications and results."""
