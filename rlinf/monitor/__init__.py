"""What is told of a run: numbers, log lines, live display, timeline, memory, pictures, a page."""
