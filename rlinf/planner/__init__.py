"""What is foreseen: profiles, time and memory of plans, the search, simulated steps, preflight."""
