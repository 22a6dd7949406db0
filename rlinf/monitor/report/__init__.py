"""A run as one HTML file: graph, plan, timeline, idle shares, decisions, metrics."""
