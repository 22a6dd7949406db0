"""Metrics, loggers, progress and timeline.

``metrics_log`` writes the numbers, ``loggers`` holds one adapter per service, ``progress`` the
live display, ``timeline`` the trace, ``run_directory`` the files of a run, ``log`` its text,
``curve`` and ``video`` its pictures.
"""
