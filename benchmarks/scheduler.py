"""Messages, channels, calls and start-up of the scheduler, beside Ray's own and a memory copy.

All in one run, on Ray: ``python benchmarks/scheduler.py``. Each line prints ours, the peer, and the
ratio; the targets are those that the project set itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
import torch
from ray.util.queue import Queue

from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, Worker

MEGABYTE = 1 << 20
STREAM_NUMEL = 16 * MEGABYTE  # 64 MB of float32


class Peer(Worker):
    """One end of every benchmark; imports torch like any training worker."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        torch.set_num_threads(1)

    def nothing(self) -> None:
        """An empty call."""

    def ping(self, out: Any, back: Any, count: int) -> list[float]:
        seconds = []
        for index in range(count):
            begin = time.perf_counter()
            out.put({"step": index, "reward": 0.5})
            back.get()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def pong(self, out: Any, back: Any, count: int) -> None:
        for _ in range(count):
            back.put(out.get())

    def first_contact(self, group: str, rank: int) -> float:
        begin = time.perf_counter()
        self.send("hello", group, rank)
        self.recv(group, rank)
        return time.perf_counter() - begin

    def answer(self, group: str, rank: int) -> None:
        self.send(self.recv(group, rank), group, rank)

    def produce(self, channel: Channel, count: int) -> None:
        tensor = torch.ones(STREAM_NUMEL)
        for _ in range(count):
            channel.put(tensor)

    def consume(self, channel: Channel, count: int) -> float:
        """Bytes per second, without the first items, which fault pages in."""
        warm = 4
        for _ in range(warm):
            channel.get()
        begin = time.perf_counter()
        for _ in range(count - warm):
            tensor = channel.get()
            tensor[-1].item()
        return (count - warm) * STREAM_NUMEL * 4 / (time.perf_counter() - begin)


class BareActor:
    """What Ray's own cost is measured on."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)

    def nothing(self) -> None:
        """An empty call."""


def timed(function: Callable[[], Any], count: int) -> float:
    """Median seconds of a call."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def report(  # noqa: PLR0917 - a table row
    name: str, ours: float, peer: float, unit: str, peer_name: str, target: str
) -> None:
    ratio = ours / peer if peer else float("nan")
    print(f"{name:34} {ours:9.3f} {unit:5} {peer_name}: {peer:9.3f}  x{ratio:.2f}  target {target}")


def memcpy_rate() -> float:
    """Bytes per second of copying one 64 MB tensor into another."""
    source, target = torch.ones(STREAM_NUMEL), torch.zeros(STREAM_NUMEL)
    return STREAM_NUMEL * 4 / timed(lambda: target.copy_(source), 20)


def start_up(cluster: Cluster, rounds: int) -> None:
    bare = ray.remote(num_cpus=0)(BareActor)

    def start_bare() -> float:
        begin = time.perf_counter()
        actors = [bare.remote() for _ in range(4)]
        ray.get([actor.nothing.remote() for actor in actors])
        seconds = time.perf_counter() - begin
        for actor in actors:
            ray.kill(actor)
        return seconds

    def start_ours(index: int) -> float:
        begin = time.perf_counter()
        group = Peer.create_group().launch(
            cluster, NodePlacementStrategy([0] * 4), name=f"start{index}"
        )
        group.nothing().wait()
        seconds = time.perf_counter() - begin
        group._close()
        return seconds

    start_bare()
    pairs = [(start_ours(index), start_bare()) for index in range(rounds)]
    ours, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
    report("four workers up", ours, peer, "s", "four bare actors", "<= 1.3x")


def calls(cluster: Cluster) -> None:
    group = Peer.create_group().launch(cluster, NodePlacementStrategy([0]), name="one")
    actor = ray.remote(num_cpus=0)(BareActor).remote()
    group.nothing().wait()
    ray.get(actor.nothing.remote())
    for _ in range(2):
        ours = timed(lambda: group.nothing().wait(), 500)
        peer = timed(lambda: ray.get(actor.nothing.remote()), 500)
    report("group call of one worker", ours * 1e3, peer * 1e3, "ms", "raw actor call", "<= 1.3x")
    group._close()
    ray.kill(actor)


def messages(cluster: Cluster, count: int) -> None:
    group = Peer.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="pair")
    group.nothing().wait()
    answering = group.execute_on(1).answer("pair", 0)
    (contact,) = group.execute_on(0).first_contact("pair", 1).wait()
    answering.wait()
    report("first contact of a pair", contact * 1e3, 50.0, "ms", "target", "<= 50 ms")

    def ping_pong(out: Any, back: Any) -> float:
        answering = group.execute_on(1).pong(out, back, count)
        (seconds,) = group.execute_on(0).ping(out, back, count).wait()
        answering.wait()
        return float(statistics.median(seconds[count // 10 :]))

    queues = Queue(), Queue()
    ours = ping_pong(Channel.create("out"), Channel.create("back"))
    peer = ping_pong(*queues)
    report("channel ping-pong p50", ours * 1e3, peer * 1e3, "ms", "ray.util.queue", "<= 0.5 ms")
    hosted = ping_pong(
        Channel.create("out-hosted", host="pair:1"), Channel.create("back-hosted", host="pair:0")
    )
    report("  hosted at the consumer", hosted * 1e3, peer * 1e3, "ms", "ray.util.queue", "-")
    for queue in queues:
        queue.shutdown()

    stream = Channel.create("stream", maxsize=2)
    producing = group.execute_on(0).produce(stream, 40)
    (rate,) = group.execute_on(1).consume(stream, 40).wait()
    producing.wait()
    report("stream of 64 MB tensors", rate / 1e9, memcpy_rate() / 1e9, "GB/s", "memcpy", ">= 0.4x")
    group._close()


def memory() -> None:
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]
    total = sum(process.memory_full_info().pss for process in processes)
    print(f"{'PSS of the process tree':34} {total / 1e9:9.3f} GB    {len(processes)} processes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="round trips of a ping-pong")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of the start-up")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cluster = Cluster(num_nodes=1)
    memory()
    calls(cluster)
    messages(cluster, arguments.count)
    start_up(cluster, arguments.rounds)
    cluster.shutdown()


if __name__ == "__main__":
    main()
