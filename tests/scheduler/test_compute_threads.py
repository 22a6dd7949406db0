"""What a thread keeps to compute with, and gives back."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from rlinf.scheduler.runtime.local import release_compute_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")


def native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_threads_of_a_computation_end_and_come_back() -> None:
    matrix = torch.randn(512, 512)
    product = matrix @ matrix
    counts: list[int] = []
    products: list[torch.Tensor] = []

    def compute() -> None:
        torch.set_num_threads(2)
        counts.append(native_threads())
        for _ in range(2):
            products.append(matrix @ matrix)
            counts.append(native_threads())
            release_compute_threads()
            counts.append(native_threads())

    before = torch.get_num_threads()
    worker = threading.Thread(target=compute)
    worker.start()
    worker.join()
    torch.set_num_threads(before)
    alone = counts[0]
    assert counts == [alone, alone + 1, alone, alone + 1, alone]
    for found in products:
        torch.testing.assert_close(found, product)
