"""Stand-in for rlinf-robotwin-runtime 0.1.3."""
