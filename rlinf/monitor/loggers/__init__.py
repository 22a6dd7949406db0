"""Adapters of metric loggers, one file each."""
