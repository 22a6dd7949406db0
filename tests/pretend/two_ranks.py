"""One of two processes that divide language models on the CPU or on the pretend accelerator.

Arguments: ``cpu`` or ``pretend``, the rank, a directory in which they meet. What each case gave is
pickled to the standard output.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

if sys.argv[1:2] == ["pretend"]:
    from tests.pretend import accelerator  # before anything else has torch

    os.environ["RLINF_DEVICE"] = accelerator.NAME
    accelerator.refuse_work_of_the_host()

import torch

from rlinf.scheduler.accelerators import AcceleratorType, process_device
from rlinf.trainers.ranks import Ranks
from tests.trainers import language_models, two_ranks

CASES: dict[str, dict[str, Any]] = {
    "data": two_ranks.CASES["data"] | {"offload": {"weights": True, "optimizer": True}},
    "adapter, padded": two_ranks.CASES["data, adapter"] | {"packing": False},
    "bfloat16, each layer": two_ranks.CASES["data, bfloat16, little memory"],
    "tensor": two_ranks.CASES["tensor"],
}


def observe(ranks: Ranks, directory: Path, name: str) -> dict[str, Any]:
    """Updates of a case, and state that came back from the disk and from the host's memory."""
    keys = two_ranks.REFERENCE
    one = language_models.trainer(
        language_models.model(), name="grpo", keys=keys, ranks=ranks, **CASES[name]
    )
    found = two_ranks.observe(one)
    one.save_sharded(directory / name)
    one.load_sharded(directory / name)
    one.offload()
    one.onload()
    found["metrics"].append(one.train(two_ranks.rollout(), two_ranks.STEPS + 1))
    found["state"] = one.state_dict()
    # Senders get weights where they lie; all else that leaves the trainer lies on the host.
    found["weights"] = {name: tensor.to("cpu") for name, tensor in found["weights"].items()}
    return found


def main(rank: int, directory: Path) -> None:
    """Run every case."""
    device = process_device(AcceleratorType.NO_ACCEL, 0)
    store = torch.distributed.FileStore(str(directory / "meet"), 2)
    ranks = Ranks(rank, 2, device=device, store=store, timeout_s=120)
    if device != "cpu":
        assert torch.get_device_module(device).current == torch.device(device)
    results = {name: observe(ranks, directory, name) for name in CASES}
    ranks.close()
    sys.stdout.buffer.write(pickle.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[2]), Path(sys.argv[3]))
