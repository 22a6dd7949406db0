"""Whether memory that was freed is used again, and given back where that is asked for."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import psutil
from rlinf.processes.allocator import keep_freed_memory, return_freed_memory

def use():
    blocks = [bytearray(3 * 2**20) for _ in range(8)]
    later = bytearray(100)  # what lies above what is freed is not the end of the heap
    del blocks

def faults(passes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(passes):
        use()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / passes

if sys.argv[1] == "keep":
    keep_freed_memory()
use()
per_pass, held = faults(10), psutil.Process().memory_info().rss
return_freed_memory()
print(per_pass, (held - psutil.Process().memory_info().rss) / 2**20)
"""


def measured(word: str, **environment: str) -> tuple[float, float]:
    """Page faults of a pass that uses 24 MiB, and MiB that were given back at the end."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "LD_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, word],
        capture_output=True,
        text=True,
        check=True,
        env=clean | environment,
    )
    faults, returned = map(float, done.stdout.split())
    return faults, returned


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt") or sys.platform != "linux", reason="not glibc"
)
def test_freed_memory_is_used_again_until_it_is_given_back() -> None:
    usual, _ = measured("nothing")
    kept, returned = measured("keep")
    assert (usual > 1000, kept < 100) == (True, True), (usual, kept)
    assert returned > 20
    told, _ = measured("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert told > 1000  # what the environment says is left alone
