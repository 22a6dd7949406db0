"""Rollout engines: how completions of prompts are generated."""
