"""Small runs on the pretend accelerator, in a process of their own; its kinds run anywhere.

Reads one run after the other from its input, as JSON: the kind, a directory, then overrides of its
recipe. Says ``DONE`` after each; the first that fails ends it, with the stack on standard error.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, cast

DONE = "-- done --"


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


def recording(directory: Path, run: str, *overrides: str) -> None:
    """Episodes that the policy of a run plays."""
    from rlinf.cli.tasks import task_of_run
    from rlinf.runners.record import policy_of, record

    config, actor, _ = policy_of(task_of_run(Path(run)), Path(run), overrides)
    record(config, directory / "run", actor=actor, episodes=3, num_envs=2)


def forgetful(directory: Path, *overrides: str) -> None:
    """The same, but the exploration noise is left where it was drawn."""
    from rlinf.workers import rollout

    class Left(rollout.torch.Tensor):
        def to(self, *_: object, **__: object) -> rollout.torch.Tensor:
            return self.as_subclass(rollout.torch.Tensor)

    rows = rollout._Noise.rows
    rollout._Noise.rows = lambda self, batch: {
        name: drawn.as_subclass(Left) for name, drawn in rows(self, batch).items()
    }
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


def vision_language_action(directory: Path, *overrides: str) -> None:
    """PPO on a small π₀.₅, from pictures."""
    from tests.runners.vla_support import train

    train(directory, *overrides)


def imitation(directory: Path, *overrides: str) -> None:
    """Flow matching of a small π₀.₅ to recorded episodes, and an evaluation."""
    from tests.runners.vla_support import imitate

    imitate(directory, *overrides)


def both_send_first(directory: Path, *_: str) -> None:
    """Two workers that send each other tensors before either receives, by a library that sends no
    sooner than the other side receives."""
    import pytest
    import torch

    from rlinf.scheduler import AcceleratorUtil
    from rlinf.scheduler.transport import accelerator, payload
    from tests.pretend.accelerator import DEVICE
    from tests.scheduler.test_accelerator_transfer import Meeting, worker

    del directory
    meeting, codec = Meeting(), payload.Codec(cast(Any, None))  # messages use no shared memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "process_group", meeting.join)
        patch.setattr(AcceleratorUtil, "get_device_type", lambda _: DEVICE.type)
        messages, lost = [], _Unpicklable()
        for own, peer in [("a", "b"), ("b", "a")]:
            pair = accelerator.PairTransfer(
                worker(own, [int(own == "b")]), worker(peer, [int(own == "a")]), None
            )
            small = torch.tensor(len(messages), dtype=torch.int16, device=DEVICE)
            large = torch.arange(6.0, device=DEVICE).view(2, 3).requires_grad_()
            # Encoded anew, by value, for the sake of a class that cannot be imported.
            messages.append(codec.encode([small, large, small, lost], pair=pair, inline=True))
            assert pair.nbytes == 2 + 24
            pair.flush()
            small.add_(7)
        for number, message in enumerate(messages):
            one, two, three, _ = codec.decode(message)
            assert one is three
            assert (one.device, one.dtype, one.item()) == (DEVICE, torch.int16, number)
            assert two.requires_grad
            assert two.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def _of_no_module() -> type:
    class Unpicklable:
        pass

    return Unpicklable


_Unpicklable = _of_no_module()


KINDS = {
    "both_send_first": both_send_first,
    "embodied": embodied,
    "off_policy": off_policy,
    "recording": recording,
    "forgetful": forgetful,
    "fine_tuning": fine_tuning,
    "cloning": cloning,
    "reasoning": reasoning,
    "vision_language_action": vision_language_action,
    "imitation": imitation,
}


if __name__ == "__main__":
    from tests.pretend import accelerator  # before anything else has torch

    os.environ["RLINF_DEVICE"] = accelerator.NAME
    accelerator.refuse_work_of_the_host()
    for line in sys.stdin:
        kind, directory, *overrides = json.loads(line)
        KINDS[kind](Path(directory), *overrides)
        print(DONE, flush=True)
