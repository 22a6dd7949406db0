"""Language models that act in turns: tools, and conversations with them."""
