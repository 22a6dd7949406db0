"""Weights from the workers that train to the workers that generate."""
