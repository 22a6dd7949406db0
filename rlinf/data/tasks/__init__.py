"""Generated sets of tasks with exact answers, split into training and held-out prompts."""
