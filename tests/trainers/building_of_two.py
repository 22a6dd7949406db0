"""Builds a trainer of a larger model in each of two processes, and says what memory that took."""

from __future__ import annotations

import ctypes
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from rlinf.trainers.ranks import Ranks
from rlinf.trainers.trained import TrainedModule, local_part
from tests.trainers.language_models import model, trainer
from tests.trainers.processes import results_of

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}


def run(directory: Path) -> list[Any]:
    """What :func:`measure` returns in each of two processes."""
    return results_of(__name__, lambda rank: (rank, directory), seconds=240)


def resident(kind: str) -> int:
    """Bytes of host memory that this process has (VmRSS), or had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def measure(ranks: Ranks) -> dict[str, Any]:
    """Bytes above those before there was a model, most until it was divided; of what is kept."""
    config: dict[str, Any] = {"ranks": ranks}
    trainer(model(), **config)  # imports, and what is made once
    peaks: list[int] = []
    restart = TrainedModule.restart_optimizer

    def note_peak(self: TrainedModule, *arguments: Any, **options: Any) -> None:
        # Moments are parts in any case, of which there are twice as many.
        peaks.append(resident("VmHWM"))
        restart(self, *arguments, **options)

    TrainedModule.restart_optimizer = note_peak  # type: ignore[method-assign]
    before = resident("VmRSS")
    large = model(**SIZES).to(torch.bfloat16)
    whole = {name: float(p.detach().float().sum()) for name, p in large.named_parameters()}
    numbers = sum(parameter.numel() for parameter in large.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS from here on
    one = trainer(large, **config)
    parts = [local_part(parameter) for parameter in one.modules.held["policy"].module.parameters()]
    return {
        "numbers": numbers,
        "peak": peaks[0] - before,
        "kept": sum(part.untyped_storage().nbytes() for part in parts),
        "dtypes": {part.dtype for part in parts},
        "sums": {name: (whole[name], float(tensor.sum())) for name, tensor in one.weights()},
    }


if __name__ == "__main__":
    # M_MMAP_THRESHOLD: what is given back goes back to the system, and does not count any more.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    rank, folder = sys.argv[1:]
    world = Ranks(int(rank), 2, store=torch.distributed.FileStore(f"{folder}/meet", 2))
    outcome = measure(world)
    world.close()
    sys.stdout.buffer.write(pickle.dumps(outcome))
