"""Runners whose worst step fails; processes that run them import nothing else of the tests."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from rlinf.errors import ConfigError

MIB = 2**20


def allocate(count: int) -> ctypes.Array[Any]:
    """So many bytes, written to, so that they are there."""
    block = ctypes.create_string_buffer(count)
    for place in range(0, count, 4096):
        block[place] = b"x"
    return block


class Greedy:
    """A runner that takes more and more of the host."""

    def __init__(self, *_: object) -> None:
        pass

    def run_worst_case(self) -> Any:
        blocks = []
        while True:
            blocks.append(allocate(16 * MIB))
            time.sleep(0.05)


class Full(Greedy):
    """A runner whose device is full."""

    def run_worst_case(self) -> Any:
        import torch

        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")


class Wrong(Greedy):
    """A runner with a mistake of its user's."""

    def run_worst_case(self) -> Any:
        raise ConfigError("is wrong", key="a.key")


class Broken(Greedy):
    """A runner with a mistake of ours."""

    def run_worst_case(self) -> Any:
        raise IndexError("a mistake")


class Gone(Greedy):
    """A runner whose process ends."""

    def run_worst_case(self) -> Any:
        os._exit(3)
