"""Trained policies answer over a wire: an action server, its client, chunks in real time."""
