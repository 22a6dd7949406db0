"""Algorithms for language models: advantages and losses over sampled tokens."""
