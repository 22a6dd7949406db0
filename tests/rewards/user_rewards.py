"""Reward functions of a user, well-behaved and not."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from rlinf.rewards.protocol import RewardInput


def behave(sample: RewardInput, *, factor: float = 1.0):
    """Does what the completion says."""
    word, _, rest = sample.completion.partition(" ")
    actions = {
        "value": lambda: float(rest) * factor,
        "integer": lambda: int(rest),
        "numpy": lambda: np.float32(rest),
        "raise": lambda: 1 / 0,
        "half": half,
        "nan": lambda: float("nan"),
        "infinity": lambda: -float("inf"),
        "text": lambda: rest,
        "none": lambda: None,
        "truth": lambda: True,
        "fork": lambda: 1.0 if os.fork() else 2.0,
        "fork_and_raise": lambda: 1.0 if os.fork() else 1 / 0,
        "hang": lambda: time.sleep(1000),
        "hang_in_c": lambda: pow(3, 3**22) % 7,
        "deaf": deaf,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit": lambda: os._exit(3),
        "leave": lambda: sys.exit("gone"),
        "memory": lambda: len(bytearray(2**40)),
        "print": lambda: print("words of a dying process", file=sys.stderr) or os._exit(1),
        "wait": lambda: time.sleep(float(rest)) or float(rest),
        "pid": os.getpid,
        "torch": lambda: float("torch" in sys.modules),
        "main_thread": lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL) is not None,
    }
    result = actions[word]()
    return float(result) if word == "main_thread" else result


def compare(samples: list[RewardInput], *, by: str | None = None):
    """Ranks the completions by length, or by what a function gave them; or does what one says."""
    for sample in samples:
        word, _, rest = sample.completion.partition(": ")
        if word == "group":
            actions = {
                "raise": lambda: 1 / 0,
                "few": lambda: [0.0],
                "one number": lambda: 0.0,
                "mapping": lambda: dict.fromkeys(range(len(samples)), 1.0),
                "nan": lambda: [float("nan")] * len(samples),
                "array": lambda: np.arange(len(samples), dtype=np.float32),
                "hang": lambda: time.sleep(1000),
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            }
            return actions[rest]()
    keys = [sample.values[by] if by else len(sample.completion) for sample in samples]
    return [float(sorted(keys).index(key)) for key in keys]


def half() -> None:
    raise ValueError("no number: \ud83d")


def deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


not_callable = 3
