"""Supervised child processes, their messages, and the memory that they share with the parent."""
