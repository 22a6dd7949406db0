"""A small run on the CPU or on the pretend accelerator, in a process of its own.

Arguments: ``cpu`` or ``pretend``, the kind of run, a directory, then overrides of its recipe.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

if sys.argv[1] == "pretend":
    from tests.pretend import accelerator  # before anything else has torch

    os.environ["RLINF_DEVICE"] = accelerator.NAME
    accelerator.refuse_modules_of_the_host()


def embodied(directory: Path, *overrides: str) -> None:
    """PPO on a Gaussian policy."""
    from rlinf.monitor.run_directory import RunDirectory
    from rlinf.runners.embodied import Embodied
    from rlinf.runners.run import Run
    from tests.runners.support import small_config

    config = small_config(directory, *overrides)
    with RunDirectory.create(directory, "small", path=directory / "run") as run:
        Run(Embodied, config, run, threading.Event()).run()


def off_policy(directory: Path, *overrides: str) -> None:
    """SAC from a replay."""
    from tests.runners.off_policy_support import train

    train(directory, *overrides)


def forgetful(directory: Path, *overrides: str) -> None:
    """The same, but the exploration noise is left where it was drawn."""
    from rlinf.workers import rollout

    class Left(rollout.torch.Tensor):
        def to(self, *_: object, **__: object) -> rollout.torch.Tensor:
            return self.as_subclass(rollout.torch.Tensor)

    rows = rollout._Noise.rows
    rollout._Noise.rows = lambda self, batch: rows(self, batch).as_subclass(Left)
    embodied(directory, *overrides)


def fine_tuning(directory: Path, *overrides: str) -> None:
    """Supervised training of a language model of transformers."""
    from tests.runners import supervised_support as support

    support.run_recipe(support.write_fine_tuning(directory), directory / "run", *overrides)


def cloning(directory: Path, *overrides: str) -> None:
    """Behaviour cloning, and an evaluation of the policy that it gives."""
    from tests.runners import supervised_support as support

    support.run_recipe(support.write_cloning(directory), directory / "run", *overrides)


def reasoning(directory: Path, *overrides: str) -> None:
    """GRPO on a language model of transformers."""
    from tests.runners.reasoning_support import train

    train(directory, *overrides)


if __name__ == "__main__":
    kinds = {
        "embodied": embodied,
        "off_policy": off_policy,
        "forgetful": forgetful,
        "fine_tuning": fine_tuning,
        "cloning": cloning,
        "reasoning": reasoning,
    }
    kinds[sys.argv[2]](Path(sys.argv[3]), *sys.argv[4:])
