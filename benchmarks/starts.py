"""Seconds until env processes are ready, and their memory: as forks of one that has imported what
they need, and as interpreters of their own; beside gymnasium's AsyncVectorEnv.

    python benchmarks/starts.py                       # 8 processes, one env each
    python benchmarks/starts.py --processes 2 --turns 9

Printed are medians over turns, in each of which every way starts twice in a driver of its own: the
first start in it, which includes what it imports, and the second. Memory is what is of a process
alone. AsyncVectorEnv spawns, as where a driver has threads it must; it has CartPole alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil

TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "CartPole-v1": ("gymnasium", {"id": "CartPole-v1"}),
    "MetaWorld reach-v3": ("metaworld", {"task": "reach-v3"}),
}
WAYS = ("forks", "interpreters", "AsyncVectorEnv")
Start = tuple[float, float]
"""Seconds, and MiB of a process alone."""


def of_ours(way: str, task: str, processes: int) -> Start:
    """A start of our env processes."""
    from rlinf.envs.config import EnvConfig
    from rlinf.envs.supervised.vector import SupervisedVectorEnv
    from rlinf.processes import template

    template.POSSIBLE = way == "forks"
    kind, options = TASKS[task]
    config = EnvConfig(type=kind, options=options, max_episode_steps=100, processes=processes)
    begin = time.perf_counter()
    with SupervisedVectorEnv(config, num_envs=processes, seed=0) as env:
        return time.perf_counter() - begin, alone(env.process_ids)


def of_gymnasium(processes: int) -> Start:
    """A start of gymnasium's processes."""
    import gymnasium
    from gymnasium.vector import AsyncVectorEnv

    begin = time.perf_counter()
    makers = [lambda: gymnasium.make("CartPole-v1")] * processes
    env = AsyncVectorEnv(makers, context="spawn")
    seconds = time.perf_counter() - begin
    memory = alone([process.pid for process in env.processes if process.pid is not None])
    env.close()
    return seconds, memory


def alone(pids: list[int]) -> float:
    """MiB that each process has for itself, on average."""
    return statistics.mean(psutil.Process(pid).memory_full_info().uss for pid in pids) / 2**20


def starts(way: str, task: str, processes: int) -> list[Start]:
    """Two starts in this process."""
    if way == "AsyncVectorEnv":
        return [of_gymnasium(processes) for _ in range(2)]
    return [of_ours(way, task, processes) for _ in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs=2, metavar=("WAY", "TASK"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        way, task = asked.only
        print(json.dumps(starts(way, task, asked.processes)))
        return
    for task in TASKS:
        ways = WAYS if task == "CartPole-v1" else WAYS[:2]
        found: dict[str, list[list[Start]]] = {way: [] for way in ways}
        for _ in range(asked.turns):
            for way in ways:
                words = [sys.executable, __file__, "--processes", str(asked.processes)]
                ran = subprocess.run(
                    [*words, "--only", way, task], stdout=subprocess.PIPE, text=True, check=True
                )
                found[way].append(json.loads(ran.stdout))
        first = {way: statistics.median(turn[0][0] for turn in found[way]) for way in ways}
        second = {way: statistics.median(turn[1][0] for turn in found[way]) for way in ways}
        memory = {way: statistics.median(turn[1][1] for turn in found[way]) for way in ways}
        print(f"{task}, {asked.processes} processes")
        for way in ways:
            print(
                f"  {way}: first start {first[way]:.3f} s, second {second[way]:.3f} s, "
                f"{memory[way]:.1f} MiB each; {first[way] / first['forks']:.2f} and "
                f"{second[way] / second['forks']:.2f} of forks, memory "
                f"{memory[way] / memory['forks']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
