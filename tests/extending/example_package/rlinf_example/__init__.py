"""An example of a package outside rlinf: an env, a model, an algorithm and a logger."""
