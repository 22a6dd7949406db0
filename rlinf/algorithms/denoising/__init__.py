"""Algorithms for policies that denoise their actions."""
