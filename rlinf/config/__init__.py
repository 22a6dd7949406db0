"""Strict configuration: base classes, recipes, overrides, explain."""
