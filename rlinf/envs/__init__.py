"""Environment protocol, supervised env processes and simulator adapters."""
