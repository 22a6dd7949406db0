"""One program under every mode: collocated, disaggregated, hybrid, pipelined, in one run.

    python benchmarks/modes.py                    # the three workloads
    python benchmarks/modes.py rendering --steps 6 --rounds 3

The machine's cores are divided into two slots, which act as devices. Workloads:

``rendering``  a simulator that renders pictures, and a convolutional policy that takes as long
``chunks``     a simulator of states and a policy that decides on 8 actions at once: policy ≪ env
``reasoning``  completions of heavy-tailed lengths (geometric, mean about 64, cut at 256)

Every mode is a run of `rlinf train` with another placement; rounds are interleaved, so that what
else the machine does hits all modes alike. Printed: the median seconds of a step, its ratio to the
sequential mode (everything on one slot), and whether the training metrics of the modes agree
to the bit. `auto` is a run with ``plan: auto`` that plans and settles by itself; counted are its
steps after it has settled.

In every round the components are measured first (`rlinf plan --measure`), and what simulator and
planner predict from that profile is printed beside what each mode took, with the error; at the end
the median absolute error of temporal plans (nodes take turns) and of the others.

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
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from mode_workloads import AUTO, SEQUENTIAL, WORKLOADS, Workload
from predictions import Prediction, kept_profile, measure_profile, prediction, summary

from rlinf.monitor.decisions import read_decisions

# What `auto` takes at most, with a profile, before it has settled: two placements of 2 + 4 steps,
# and a step under the one that it returns to.
SETTLING = 13
NOT_COMPARED = ("time", "per_second", "memory/")


def length(recipe: dict[str, Any], steps: int) -> dict[str, int]:
    """The override that ends a run after so many steps."""
    if "env" not in recipe:
        return {"runner.total_steps": steps}
    size = recipe["env"]["num_envs"] * recipe["rollout"]["steps"]
    return {"runner.total_env_steps": steps * size}


def words(overrides: dict[str, Any]) -> list[str]:
    """Overrides as on the command line."""
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]


def run(recipe: Path, overrides: dict[str, Any], directory: Path) -> list[Any]:
    """Metrics of each step of a run in a process of its own."""
    program = str(Path(sys.executable).with_name("rlinf"))
    command = [program, "train", str(recipe), *words(overrides)]
    done = subprocess.run(
        [*command, "--run-dir", str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step" in row]


def settled(directory: Path) -> int:
    """Steps of a run that were done when it had settled on a placement, and one under it."""
    ends = [d for d in read_decisions(directory) if d.what in ("keep", "return", "stay")]
    print(f"  auto: {ends[-1].what}, {ends[-1].reason}")
    return ends[-1].step + 1


def training_metrics(rows: list[Any]) -> list[dict[str, float]]:
    """What must not depend on the mode."""
    return [
        {k: v for k, v in row.items() if not any(part in k for part in NOT_COMPARED)}
        for row in rows
    ]


@dataclass
class Found:
    """What the rounds of a workload showed, by mode."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    predictions: dict[str, list[Prediction]] = field(default_factory=lambda: defaultdict(list))


def measure(name: str, steps: int, rounds: int) -> dict[str, Any]:
    """Run every mode of a workload several times and print what came of it."""
    workload, found = WORKLOADS[name](), Found()
    with tempfile.TemporaryDirectory() as temporary:
        recipe = Path(temporary) / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(workload.recipe, sort_keys=False))
        for number in range(rounds):
            print(f"{name}, round {number + 1}")
            one_round(workload, recipe, steps, Path(temporary) / f"{number}", found)
    return report(name, workload, found)


def one_round(workload: Workload, recipe: Path, steps: int, directory: Path, found: Found) -> None:
    """Measure the components, then run every mode once."""
    os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
    for place, (mode, overrides) in enumerate(workload.modes.items()):
        given = words({key: value for key, value in overrides.items() if key != "runner.plan"})
        if kept_profile(recipe, given) is None:
            measure_profile(recipe, given)
        profile = kept_profile(recipe, given)
        if mode != AUTO and profile is not None:
            found.predictions[mode].append(prediction(recipe, given, profile))
        ending = length(workload.recipe, steps + (SETTLING if mode == AUTO else 1))
        rows = run(recipe, overrides | ending, directory / f"{place}")
        first = settled(directory / f"{place}") if mode == AUTO else 1
        found.seconds[mode] += [row["time/step"] for row in rows[first:]]
        found.metrics.setdefault(mode, training_metrics(rows))


# -- printing -----------------------------------------------------------------------------------


def report(name: str, workload: Workload, found: Found) -> dict[str, Any]:
    """Print one table; returns its rows."""
    base = statistics.median(found.seconds[SEQUENTIAL])
    print(f"\n{name}: median seconds of a step and interquartile range, speed relative to ")
    print(
        f"{SEQUENTIAL}, whether metrics are equal, simulated and planned seconds with their error"
    )
    rows: dict[str, Any] = {}
    for mode, seconds in found.seconds.items():
        median, spread = statistics.median(seconds), interquartile(seconds)
        own, others = found.metrics[mode], found.metrics[SEQUENTIAL]
        common = min(len(own), len(others))
        row = {
            "seconds": median,
            "spread": spread,
            "speed": base / median,
            "equal": own[:common] == others[:common],
            **predicted(found.predictions[mode], median),
        }
        rows[mode] = row
        print(
            f"  {mode:28s} {median:8.3f} s ± {spread:5.3f} {row['speed']:6.2f} x  "
            f"{'yes' if row['equal'] else 'no ':3s} {in_words(row)}"
        )
    for what, error in summary(rows).items():
        print(f"  median absolute error, {what}: {100 * error:.1f} %")
    best = min(alternatives(workload), key=lambda mode: rows[mode]["seconds"])
    against = rows[AUTO]["seconds"] / rows[best]["seconds"] - 1
    print(f"  {AUTO} against the best that it may choose, {best}: {100 * against:+.1f} %")
    sys.stdout.flush()
    return {"modes": rows, "errors": summary(rows), "auto_against_best": against}


def predicted(found: list[Prediction], measured: float) -> dict[str, Any]:
    """Medians of what was predicted in the rounds, and how far they are off."""
    if not found:
        return {}
    typical = Prediction(
        simulated=statistics.median(p.simulated for p in found),
        planned=statistics.median(p.planned for p in found),
        temporal=found[0].temporal,
    )
    errors = dict(zip(("simulated_error", "planned_error"), typical.errors(measured), strict=True))
    return {**asdict(typical), **errors}


def in_words(row: dict[str, Any]) -> str:
    """The predictions of a row."""
    if "temporal" not in row:
        return ""
    parts = [
        f"{source} {row[source]:7.3f} s {100 * row[f'{source}_error']:+6.1f} %"
        for source in ("simulated", "planned")
    ]
    return f"  {'temporal' if row['temporal'] else 'spatial '}  {'  '.join(parts)}"


def interquartile(values: list[float]) -> float:
    """Range of the middle half."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def alternatives(workload: Workload) -> list[str]:
    """Modes that differ from `auto` in what it decides alone."""
    decided = {"cluster.component_placement", "rollout.pipeline_stage_num", "runner.plan"}
    rest = {
        mode: {key: value for key, value in overrides.items() if key not in decided}
        for mode, overrides in workload.modes.items()
    }
    return [mode for mode, other in rest.items() if mode != AUTO and other == rest[AUTO]]


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
