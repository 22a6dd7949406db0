"""Rewards of generated text: what a completion is worth."""
