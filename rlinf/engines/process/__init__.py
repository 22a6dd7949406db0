"""An engine in a process of its own, which is replaced where it dies or hangs."""
