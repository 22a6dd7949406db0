"""The two runtimes: threads of one process, and Ray actors."""
