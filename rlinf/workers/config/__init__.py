"""What workers read of a recipe: acting in simulators, answering prompts, learning from data."""
