"""Cluster, workers, channels and placement on two runtimes."""
