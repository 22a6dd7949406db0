"""Qwen2.5-VL and Qwen3-VL as policies with action tokens."""
