"""Stand-in: starts what a configuration needs to simulate."""

import contextlib

LAUNCHED = []


@contextlib.contextmanager
def launch_simulation(cfg, launcher_args=None):
    LAUNCHED.append(dict(launcher_args or {}))
    yield cfg.sim.physics
