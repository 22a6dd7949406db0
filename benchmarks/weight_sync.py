"""Every weight syncer beside a memory copy and torch's own files, in one run.

``python benchmarks/weight_sync.py --runtime ray --megabytes 256`` has a sender and a receiver in
two processes. A rate is bytes of weights by the time from the moment both sides are called until
the receiver has all weights; *apply* is a ``load_state_dict`` after it. The first round of each
syncer, which faults pages in, is printed apart.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker
from rlinf.weight_sync.config import (
    BucketConfig,
    PatchConfig,
    ReferenceConfig,
    SharedMemoryConfig,
    WeightSyncConfig,
)
from rlinf.weight_sync.protocol import Parties

WIDTH = 1024
PARTIES = Parties(sender="sender", receiver="receiver", receivers=1)


def model_like(megabytes: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights in the sizes of a transformer: three matrices, a vector and a bias per layer."""
    generator = torch.Generator().manual_seed(0)
    left = (megabytes << 20) // dtype.itemsize
    weights = {}
    layer = 0
    while left > 0:
        for name, shape in {
            "attention": (WIDTH, WIDTH),
            "up": (4 * WIDTH, WIDTH),
            "down": (WIDTH, 4 * WIDTH),
            "norm": (WIDTH,),
            "bias": (4 * WIDTH,),
        }.items():
            weights[f"{layer}.{name}"] = torch.randn(shape, generator=generator).to(dtype)
            left -= weights[f"{layer}.{name}"].numel()
        layer += 1
    return weights


def nbytes_of(weights: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


class Side(Worker):
    """Either side."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    def prepare(self, megabytes: int, dtype: torch.dtype) -> int:
        self.weights = model_like(megabytes, dtype)
        return nbytes_of(self.weights)

    def open(self, config: WeightSyncConfig, sends: bool) -> None:
        build = config.build_sender if sends else config.build_receiver
        self.syncer: Any = build(self, PARTIES)

    def change(self, density: float, seed: int) -> None:
        """Change that fraction of the entries."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.weights.values():
            count = max(1, round(density * tensor.numel()))
            at = torch.randint(0, tensor.numel(), (count,), generator=generator)
            tensor.view(-1)[at] += 1

    def send_all(self, version: int) -> tuple[Any, float]:
        begin = time.perf_counter()
        sent = self.syncer.send(self.weights, version)
        return sent, time.perf_counter() - begin

    def receive_all(self) -> tuple[float, float, float]:
        """Seconds from the call to all weights, seconds of applying them, and a sum of them."""
        begin = time.perf_counter()
        weights, _ = self.syncer.receive()
        seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)
        applied = time.perf_counter() - begin
        total = float(sum(tensor.view(-1)[-1] for tensor in self.weights.values()))
        del weights
        self.syncer.release()
        return seconds, applied, total

    def last_sum(self) -> float:
        return float(sum(tensor.view(-1)[-1] for tensor in self.weights.values()))

    def close_syncer(self) -> None:
        self.syncer.close()
        del self.syncer


def median_seconds(function: Callable[[], Any], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def peers(weights: dict[str, torch.Tensor], rounds: int) -> tuple[float, float]:
    """Bytes per second of copying all tensors, and of torch.save and torch.load in memory."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            targets[name].copy_(tensor)

    def save_and_load() -> None:
        stream = io.BytesIO()
        torch.save(weights, stream)
        stream.seek(0)
        torch.load(stream)

    size = nbytes_of(weights)
    copy()
    save_and_load()
    return size / median_seconds(copy, rounds), size / median_seconds(save_and_load, 3)


def measure(
    sender: Any, receiver: Any, config: WeightSyncConfig, rounds: int, density: float
) -> dict[str, Any]:
    """Times of a syncer: the first update, and the median of later ones."""
    sender.open(config, True).wait()
    receiver.open(config, False).wait()
    rows = []
    for version in range(rounds + 1):
        sender.change(density, version).wait()
        receiving = receiver.receive_all()
        ((sent, sending),) = sender.send_all(version).wait()
        ((seconds, applied, total),) = receiving.wait()
        assert [total] == sender.last_sum().wait()
        rows.append((max(seconds, sending), applied, sending, sent))
    sender.close_syncer().wait()
    receiver.close_syncer().wait()
    return {
        "first": rows[0][0],
        "seconds": statistics.median(row[0] for row in rows[1:]),
        "apply": statistics.median(row[1] for row in rows[1:]),
        "send": statistics.median(row[2] for row in rows[1:]),
        "sent": rows[-1][3],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", choices=["local", "ray"], default="ray")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--density", type=float, default=0.01, help="changed entries of a patch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    cluster = Cluster(cluster_cfg={"num_nodes": 1, "runtime": arguments.runtime})
    groups = [
        Side.create_group().launch(cluster, NodePlacementStrategy([0]), name=name)
        for name in ("sender", "receiver")
    ]
    sender, receiver = groups
    (size,) = sender.prepare(arguments.megabytes, dtype).wait()
    receiver.prepare(arguments.megabytes, dtype).wait()
    weights = model_like(arguments.megabytes, dtype)
    copied, saved = peers(weights, arguments.rounds)
    del weights
    print(f"{size / 1e6:.0f} MB of {arguments.dtype}, runtime {arguments.runtime}")
    print(f"{'memcpy':22} {copied / 1e9:7.2f} GB/s")
    print(f"{'torch.save + load':22} {saved / 1e9:7.2f} GB/s  x{saved / copied:.2f} of memcpy")
    configs: dict[str, WeightSyncConfig] = {
        "shared_memory, copy": SharedMemoryConfig(),
        "shared_memory, view": SharedMemoryConfig(reads="view"),
        "bucket 64 MiB": BucketConfig(),
        "bucket 8 MiB": BucketConfig(bucket_size=8 << 20),
        "patch": PatchConfig(),
    }
    if arguments.runtime == "local":
        configs = {"reference": ReferenceConfig(), **configs}
    else:
        configs["bucket, gloo"] = BucketConfig(transport="gloo")
    for name, config in configs.items():
        found = measure(sender, receiver, config, arguments.rounds, arguments.density)
        rate, sent = size / found["seconds"], found["sent"]
        print(
            f"{name:22} {rate / 1e9:7.2f} GB/s  x{rate / copied:.2f} of memcpy"
            f"   first {found['first']:.3f} s, send {found['send']:.3f} s, receive "
            f"{found['seconds']:.3f} s, apply {found['apply']:.3f} s"
        )
        if sent.kind == "patch":
            print(
                f"{'':22} {sent.nbytes / 1e6:.2f} MB at density {sent.density:.4f}: "
                f"{size / sent.nbytes:.1f}x fewer bytes than all weights"
            )
    for group in groups:
        group._close()
    cluster.shutdown()


if __name__ == "__main__":
    main()
