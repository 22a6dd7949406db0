"""How gradients are applied."""
