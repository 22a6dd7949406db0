"""Stand-in for Isaac Lab 3.0.0."""
