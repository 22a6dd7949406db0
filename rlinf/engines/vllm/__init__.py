"""vLLM, in steps of the caller or in the background."""
