"""Metrics, loggers, progress and timeline."""
