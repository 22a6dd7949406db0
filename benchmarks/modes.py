"""One program under every mode: collocated, disaggregated, hybrid, pipelined, in one run.

    python benchmarks/modes.py                    # the three workloads
    python benchmarks/modes.py rendering --steps 6 --rounds 3

The machine's cores are divided into two slots, which act as devices. Workloads:

``rendering``  a simulator that renders pictures, and a convolutional policy that takes as long
``chunks``     a simulator of states and a policy that decides on 8 actions at once: policy ≪ env
``reasoning``  completions of heavy-tailed lengths (geometric, mean about 64, cut at 256)

Every mode trains the same recipe under another placement, in a process of its own. The modes take
turns of a few steps, so that all meet the same state of the machine; those that run ahead of their
trainer, whose rollouts would go on in the turns of others, take all their steps at the end.
Printed: the median seconds of a step, the median of its ratio to the sequential mode (everything on
one slot) in the same turn, and the first other mode whose training metrics are equal to the bit;
those of two ranks that train differ from those of one by rounding. `auto` is a run of `rlinf train`
with ``plan: auto`` that measures, plans and settles by itself; the placement that it settles on
takes turns with the others.

What the machine has to give is measured in the same turns: two runs of the sequential mode at once,
one on each slot, that have nothing to do with each other. Their steps in a second, of those of one
that runs alone, are the limit for any mode that uses both slots; 2 where they do not slow each
other.

The trials of `rlinf plan --measure` take turns with the modes too. What simulator and planner
predict from the profile that they make is printed beside what each mode took, with the error; then
the median absolute error of temporal plans (nodes take turns) and of the others, at the end over
the plans of all workloads. Of a mode on another runtime, which would have another profile, nothing
is predicted.

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
from mode_turns import Setting, Taken, Turns
from mode_workloads import AUTO, SEQUENTIAL, SLOTS, WORKLOADS, Workload, small
from predictions import Prediction, prediction, summary

from rlinf.cli.tasks import read_config
from rlinf.flow.plan import PLAN_FILE, Plan
from rlinf.flow.planning_traits import WARM_UP_STEPS
from rlinf.monitor.decisions import read_decisions
from rlinf.planner.kept_profiles import fingerprints
from rlinf.planner.planned import command_overrides, legal_trials
from rlinf.planner.profiling import profile_of

# What `auto` takes at most before it has settled: up to nine placements of 2 + 4 steps, and a step
# under the one that it returns to.
SETTLING = 55
TURN = 5  # steps, of which the first does not count
COPIES = ("sequential on the first slot", "sequential on the second")  # at once
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


def settled(recipe: Path, overrides: dict[str, Any], directory: Path) -> list[str]:
    """Overrides of the placement that a run with ``plan: auto`` settles on."""
    program = str(Path(sys.executable).with_name("rlinf"))
    command = [program, "train", str(recipe), *words(overrides)]
    done = subprocess.run(
        [*command, "--run-dir", str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
    decisions = read_decisions(directory)
    end = [d for d in decisions if d.what in ("keep", "return", "stay")][-1]
    plan = Plan.load(directory / PLAN_FILE)
    given = {key: value for key, value in overrides.items() if key != "cluster.plan"}
    _, _, config = read_config(str(recipe), words(given))
    found = command_overrides(config, plan)
    print(f"  auto: {end.what}, {end.reason}\n  it settles on {' '.join(found)}", flush=True)
    return [*words(given), *found]


def training_metrics(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """What must not depend on the mode."""
    return [
        {k: v for k, v in row.items() if not any(part in k for part in NOT_COMPARED)}
        for row in rows
    ]


@dataclass
class Found:
    """What the rounds of a workload showed, by mode.

    Also what the components of the sequential mode took, the speed of two sequential runs at once,
    and which modes `auto` settled on.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    limits: list[float] = field(default_factory=list)
    auto_is: set[str] = field(default_factory=set)
    metrics: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    predictions: dict[str, list[Prediction]] = field(default_factory=lambda: defaultdict(list))


def measure(name: str, workload: Workload, steps: int, rounds: int) -> dict[str, Any]:
    """Run every mode of a workload several times and print what came of it."""
    found = Found()
    with tempfile.TemporaryDirectory() as temporary:
        recipe = Path(temporary) / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(workload.recipe, sort_keys=False))
        for number in range(rounds):
            print(f"{name}, round {number + 1}")
            one_round(workload, recipe, steps, Path(temporary) / f"{number}", found)
    return report(name, workload, found)


def one_round(workload: Workload, recipe: Path, steps: int, directory: Path, found: Found) -> None:
    """Let `auto` settle, then take every mode, and every trial of the recipe, in turn."""
    os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
    given = {mode: words(overrides) for mode, overrides in workload.modes.items() if mode != AUTO}
    ending = length(workload.recipe, SETTLING + 1)
    given[AUTO] = settled(recipe, workload.modes[AUTO] | ending, directory / AUTO)
    configs = {mode: read_config(str(recipe), mine) for mode, mine in given.items()}
    found.auto_is |= {
        mode
        for mode in alternatives(workload)
        if configs[mode][2].plan.same_places(configs[AUTO][2].plan)
    }
    endless = words(length(workload.recipe, 10**6))
    settings = {mode: Setting(recipe, [*mine, *endless]) for mode, mine in given.items()}
    task, _, own = configs[SEQUENTIAL]
    trials = {
        label: Setting(recipe, [*given[SEQUENTIAL], *endless], number)
        for number, (label, _) in enumerate(legal_trials(own))
    }
    one = words(workload.modes[SEQUENTIAL] | moved_to_the_other_slot(workload))
    pair = settings[SEQUENTIAL], Setting(recipe, [*one, *endless])
    copies = dict(zip(COPIES, pair, strict=True))
    taken = in_turns(settings | trials | copies, -(-steps // (TURN - 1)), directory)
    found.limits += [
        alone / first + alone / second
        for alone, first, second in zip(
            *(taken[name].seconds for name in (SEQUENTIAL, *COPIES)), strict=True
        )
    ]
    for row in taken[SEQUENTIAL].metrics[WARM_UP_STEPS:]:
        for _, stage in task.flow(own).stages():
            found.parts[stage.label].append(row[f"time/{stage.label}"])
    profile = profile_of(own, task.flow, [taken[label].trial(trials[label]) for label in trials])
    for mode, mine in given.items():
        found.seconds[mode] += taken[mode].seconds
        found.metrics.setdefault(mode, training_metrics(taken[mode].metrics))
        # That of another runtime would be another one.
        if not fingerprints(configs[mode][2]).differences(profile):
            found.predictions[mode].append(prediction(recipe, mine, profile))


def moved_to_the_other_slot(workload: Workload) -> dict[str, Any]:
    """The override that puts the sequential mode on the slot that it does not use."""
    key = "cluster.component_placement"
    return {key: dict.fromkeys(workload.modes[SEQUENTIAL][key], f"{SLOTS - 1}")}


def in_turns(settings: dict[str, Setting], turns: int, directory: Path) -> dict[str, Taken]:
    """What the steps of all settings took; those that run ahead come one by one at the end."""
    ahead = {
        name
        for name, setting in settings.items()
        if setting.read()[2].planning.constraints.staleness
    }
    together = {name: setting for name, setting in settings.items() if name not in ahead}
    with Turns(together, directory / "together") as processes:
        found = processes.take(turns, TURN, at_once=[COPIES])
    for number, name in enumerate(ahead):
        with Turns({name: settings[name]}, directory / f"{number}") as processes:
            found |= processes.take(turns, TURN)
    return found


# -- printing -----------------------------------------------------------------------------------


def report(name: str, workload: Workload, found: Found) -> dict[str, Any]:
    """Print one table; returns its rows."""
    print(
        f"\n{name}: median seconds of a step and interquartile range, median of the speed relative "
        f"to {SEQUENTIAL} in the same turn, the first mode whose metrics are equal to the bit, "
        "simulated and planned seconds with their error"
    )
    rows: dict[str, Any] = {}
    for mode, seconds in found.seconds.items():
        median, spread = statistics.median(seconds), interquartile(seconds)
        row = {
            "seconds": median,
            "spread": spread,
            "speed": paired(found.seconds[SEQUENTIAL], seconds),
            "equal_to": equal_to(mode, found.metrics),
            **predicted(found.predictions[mode], median),
        }
        rows[mode] = row
        print(
            f"  {mode:28s} {median:8.3f} s ± {spread:5.3f} {row['speed']:6.2f} x  "
            f"{row['equal_to'] or '-':14s} {in_words(row)}"
        )
    parts = {part: statistics.median(seconds) for part, seconds in found.parts.items()}
    print(
        f"  {SEQUENTIAL}:", ", ".join(f"{part} {seconds:.3f} s" for part, seconds in parts.items())
    )
    limit = statistics.median(found.limits)
    spread = interquartile(found.limits)
    print(f"  {'limit: two sequential at once':41s} {limit:6.2f} x ± {spread:.2f}")
    print_errors(rows)
    best = max(alternatives(workload), key=lambda mode: rows[mode]["speed"])
    against = paired(found.seconds[AUTO], found.seconds[best]) - 1
    print(f"  {AUTO} settled on {', '.join(sorted(found.auto_is)) or 'another placement'}")
    print(f"  against the best that it may choose, {best}, its steps take {100 * against:+.1f} %")
    sys.stdout.flush()
    return {
        "modes": rows,
        "parts": parts,
        "limit": limit,
        "errors": summary(rows),
        "auto_against_best": against,
    }


def equal_to(mode: str, metrics: dict[str, list[dict[str, float]]]) -> str | None:
    """The first other mode that trained to the same metrics; None: no one did."""
    own = metrics[mode]
    for other, theirs in metrics.items():
        common = min(len(own), len(theirs))
        if other != mode and own[:common] == theirs[:common]:
            return other
    return None


def print_errors(rows: dict[str, dict[str, Any]]) -> None:
    """Print how far off predictions are."""
    for what, error in summary(rows).items():
        print(f"  median absolute error, {what}: {100 * error:.1f} %")


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


def paired(others: list[float], mine: list[float]) -> float:
    """Median ratio of seconds in the same turn."""
    return statistics.median(other / own for other, own in zip(others, mine, strict=True))


def interquartile(values: list[float]) -> float:
    """Range of the middle half."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def alternatives(workload: Workload) -> list[str]:
    """Modes that differ from `auto` in what it decides alone, or in the runtime."""
    decided = {
        "cluster.component_placement",
        "cluster.runtime",
        "rollout.pipeline_stage_num",
        "cluster.plan",
    }
    rest = {
        mode: {key: value for key, value in overrides.items() if key not in decided}
        for mode, overrides in workload.modes.items()
    }
    return [mode for mode, other in rest.items() if mode != AUTO and other == rest[AUTO]]


def main() -> None:
    """Measure and print; the figures are also written as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], default=[])
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each mode")
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is repeated")
    parser.add_argument("--small", action="store_true", help="as a trial of the program itself")
    parser.add_argument("--json", type=Path, default=Path(tempfile.gettempdir()) / "modes.json")
    arguments = parser.parse_args()
    workloads = {name: WORKLOADS[name]() for name in arguments.workloads or WORKLOADS}
    if arguments.small:
        workloads = {name: small(workload) for name, workload in workloads.items()}
    found = {
        name: measure(name, workload, arguments.steps, arguments.rounds)
        for name, workload in workloads.items()
    }
    if len(found) > 1:
        print("all workloads:")
        plans = {
            f"{name}, {mode}": row for name in found for mode, row in found[name]["modes"].items()
        }
        print_errors(plans)
    arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
