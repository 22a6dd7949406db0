"""Algorithms: advantages, losses and what data they need."""
