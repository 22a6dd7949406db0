"""One program under every mode: collocated, disaggregated, hybrid, pipelined, in one run.

    python benchmarks/modes.py                    # the three workloads
    python benchmarks/modes.py rendering --steps 6 --rounds 3

The machine's cores are divided into two slots, which act as devices. Workloads:

``rendering``  a simulator that renders pictures, and a convolutional policy that takes as long
``chunks``     a simulator of states and a policy that decides on 8 actions at once: policy ≪ env
``reasoning``  completions of heavy-tailed lengths (geometric, mean about 64, cut at 256)

Every mode is a run of `rlinf train` with another placement; rounds are interleaved, so that what
else the machine does hits all modes alike. Printed: the median seconds of a step, its ratio to the
sequential mode (one slot at work at a time), and whether the training metrics of the modes agree
to the bit. `auto` is a run with ``plan: auto`` that measures, plans and settles by itself; counted
are its steps after it has settled.

One thread per process (``OMP_NUM_THREADS=1``) is set unless given.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SLOTS = 2
SEQUENTIAL = "sequential"

MLP: dict[str, Any] = {
    "base": "quickstart",
    "runner": {"total_env_steps": 10**9},
    "evaluation": {"interval": 0, "episodes": 4, "num_envs": 4, "video_episodes": 0},
    "without": ["evaluation.stop_at_success"],
}


@dataclass(frozen=True)
class Workload:
    """What is run, and the modes it is run in: overrides by name."""

    recipe: dict[str, Any]
    modes: dict[str, dict[str, Any]]


def placed(placement: dict[str, str], **overrides: Any) -> dict[str, Any]:
    """Overrides of a placement on the two slots."""
    return {
        "cluster.cpu_devices_per_node": SLOTS,
        "cluster.component_placement": placement,
        **overrides,
    }


def embodied_modes(block: int) -> dict[str, dict[str, Any]]:
    """Placements of env, policy and trainer; blocks of one size make them equal to the bit."""
    exact = {"rollout.block_size": block}
    apart = {"env": "0", "rollout,actor": "1"}
    both = {"env": "0", "rollout": "1", "actor": "0-1"}
    same = {"env,rollout,actor": "0-1"}
    two = {"rollout.pipeline_stage_num": 2}
    return {
        SEQUENTIAL: placed(apart, **exact),
        "disaggregated, 2 stages": placed(apart, **exact, **two),
        "hybrid": placed(both, **exact),
        "hybrid, 2 stages": placed(both, **exact, **two),
        "collocated": placed(same, **exact),
        "collocated, 2 stages": placed(same, **exact, **two),
    }


def rendering() -> Workload:
    """A rendering simulator and a policy of comparable cost."""
    recipe = MLP | {
        "env": {
            "num_envs": 8,
            "train": {
                "type": "metaworld",
                "options": {"task": "window-open-v3", "images": True, "image_size": 64},
            },
        },
        "rollout": {"steps": 16},
        "model": {
            "type": "cnn",
            "channels": [192, 320, 320],
            "kernel_sizes": [8, 4, 3],
            "strides": [4, 2, 1],
            "hidden_sizes": [64],
        },
        "actor": {"global_batch_size": 64, "micro_batch_size": 8, "update_epoch": 1},
        "without": [*MLP["without"], "model.hidden_sizes"],
    }
    return Workload(recipe, embodied_modes(block=2))


def chunks() -> Workload:
    """A policy that decides rarely: the simulator takes almost all the time."""
    recipe = MLP | {
        "env": {"num_envs": 16},
        "rollout": {"steps": 64},
        "model": {"num_action_chunks": 8},
        "actor": {"global_batch_size": 64, "micro_batch_size": 16, "update_epoch": 4},
    }
    return Workload(recipe, embodied_modes(block=4))


def reasoning() -> Workload:
    """Random weights end a completion at each token with the same small probability."""
    recipe = {
        "base": "reasoning/arithmetic_grpo",
        "runner": {"total_steps": 1000},
        "data": {"max_prompt_length": 64},
        "model": {"architecture": {"max_position_embeddings": 512}},
        "rollout": {
            "prompts": 16,
            "group_size": 8,
            "sampling": {"max_new_tokens": 256},
            "engine": {"deterministic": True},
        },
        "reward": {
            "functions": {"answer": {"type": "length", "max_length": 256, "cache_length": 200}}
        },
        "actor": {"n_minibatches": 4, "optim": {"lr": 1e-6}},
        "validation": {"prompts": 2, "val_check_interval": 0},
        "without": ["warm_start"],
    }
    apart = {"rollout,reward": "0", "actor": "1"}
    same = {"rollout,reward,actor": "0-1"}
    one = {"rollout,reward,actor": "0"}
    return Workload(
        recipe,
        {
            SEQUENTIAL: placed(one),
            "disaggregated": placed(apart),
            "hybrid": placed({"rollout,reward": "0-1", "actor": "1"}),
            "collocated": placed(same, **{"cluster.runtime": "ray"}),
            "disaggregated, staleness 1": placed(apart, **{"rollout.max_staleness": 1}),
        },
    )


WORKLOADS = {"rendering": rendering, "chunks": chunks, "reasoning": reasoning}
NOT_COMPARED = ("time", "per_second", "memory/")


def length(recipe: dict[str, Any], steps: int) -> dict[str, int]:
    """The override that ends a run after so many steps."""
    if "env" not in recipe:
        return {"runner.total_steps": steps}
    size = recipe["env"]["num_envs"] * recipe["rollout"]["steps"]
    return {"runner.total_env_steps": steps * size}


def run(recipe: Path, overrides: dict[str, Any], directory: Path) -> list[Any]:
    """Metrics of each step of a run in a process of its own."""
    arguments = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    command = [str(Path(sys.executable).with_name("rlinf")), "train", str(recipe), *arguments]
    done = subprocess.run(
        [*command, "--run-dir", str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step" in row]


def training_metrics(rows: list[Any]) -> list[dict[str, float]]:
    """What must not depend on the mode."""
    return [
        {k: v for k, v in row.items() if not any(part in k for part in NOT_COMPARED)}
        for row in rows
    ]


def measure(name: str, steps: int, rounds: int) -> dict[str, Any]:
    """Run every mode of a workload several times and print what came of it."""
    workload = WORKLOADS[name]()
    seconds: dict[str, list[float]] = {mode: [] for mode in workload.modes}
    metrics: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        recipe = Path(temporary) / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(workload.recipe, sort_keys=False))
        for number in range(rounds):
            for place, (mode, overrides) in enumerate(workload.modes.items()):
                ending = length(workload.recipe, steps + 1)
                rows = run(recipe, overrides | ending, Path(temporary) / f"{place}-{number}")
                seconds[mode] += [row["time/step"] for row in rows[1:]]
                metrics.setdefault(mode, training_metrics(rows))
    return report(name, seconds, metrics)


def report(
    name: str, seconds: dict[str, list[float]], metrics: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    """Print one table; returns its rows."""
    base = statistics.median(seconds[SEQUENTIAL])
    print(f"\n{name}: median seconds of a step, speed relative to {SEQUENTIAL}, metrics equal")
    rows = {}
    for mode, found in seconds.items():
        median = statistics.median(found)
        equal = metrics[mode] == metrics[SEQUENTIAL]
        rows[mode] = {"seconds": median, "speed": base / median, "equal": equal}
        print(f"  {mode:28s} {median:8.3f} s  {base / median:6.2f} x  {'yes' if equal else 'no'}")
    sys.stdout.flush()
    return rows


def main() -> None:
    """Measure and print; the figures are also written as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], default=[])
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each mode")
    parser.add_argument("--json", type=Path, default=Path(tempfile.gettempdir()) / "modes.json")
    arguments = parser.parse_args()
    found = {
        name: measure(name, arguments.steps, arguments.rounds)
        for name in arguments.workloads or WORKLOADS
    }
    arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
