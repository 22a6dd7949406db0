"""The macro flows: each runner reads as the training step it performs."""
