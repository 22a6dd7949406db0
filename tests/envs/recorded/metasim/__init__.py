"""Stand-in for MetaSim, on which RoboVerse is built."""
