"""Prompt sets: read or generated, tokenised, drawn in a resumable order, and batched."""
