"""Stand-in for OmniGibson: like the simulator it turns the garbage collector off."""

import gc

gc.disable()
