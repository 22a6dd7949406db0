"""Vision-language-action models: their graphs, published files and policies."""
