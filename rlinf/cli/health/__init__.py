"""What ``rlinf doctor`` looks at: one file per part of the machine."""
