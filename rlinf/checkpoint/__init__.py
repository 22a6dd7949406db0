"""Atomic commits of everything a run needs.

``store.CheckpointStore`` commits, prunes and loads; ``tree`` says what may be stored;
``compatibility`` compares a checkpoint with a model; ``export`` writes weights alone.
"""
