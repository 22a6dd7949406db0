"""``rlinf doctor``, and what it looks at: one file per part of the machine."""
