"""Train a recipe from scratch over several seeds: a table, and the learning curves in one picture.

    python benchmarks/recipe.py quickstart --seeds 5 --picture docs/pictures/quickstart.png
    python benchmarks/recipe.py reasoning/arithmetic_grpo --gain 0.25
    python benchmarks/recipe.py quickstart --beside rollout.max_staleness=1 -- \\
        runner.total_env_steps=98304 evaluation.stop_at_success=null
    python benchmarks/recipe.py vla/drawer_close_pi05_ppo --first vla/drawer_close_pi05_sft \\
        --given data.path=demonstrations/drawer_close --seeds 3 --gain 0.3

Each run is a process of its own, one after the other, as a user would start it. With ``--first``
each seed goes on with the weights that another recipe left behind, trained before it with what is
``--given``; what that one reached on held-out episodes counts as before the training. With
``--directory`` runs are kept, and one that is there is not trained again. With ``--beside``
every seed is trained a second time with further overrides, and the two learning curves against
steps are compared: the mean of each run's evaluations, paired by seed, with the 95 % interval of
the mean difference.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t as student

from rlinf.data.episode_evaluation import EvaluationResult
from rlinf.data.text_evaluation import TextEvaluationResult
from rlinf.monitor.curve import EVAL_SUCCESS, Curve, overlay_curves

COMMAND = [sys.executable, "-c", "from rlinf.cli.main import main; raise SystemExit(main())"]


def train(recipe: str, seed: int, overrides: list[str], directory: Path) -> Path:
    """Run one seed; returns its run directory."""
    run = directory / f"seed_{seed}"
    if (run / "policy.safetensors").exists():
        return run
    subprocess.run(
        [*COMMAND, "train", recipe, *overrides, f"seed={seed}", "--run-dir", str(run)],
        check=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    return run


@dataclass(frozen=True)
class Outcome:
    """What a run reached on what it never trained on.

    Args:
        before: Rate before training; NaN where it was not measured.
        after: Rate at the end, with its 95 % interval.
        steps: Environment steps, or training steps.
        seconds: Training time.
    """

    before: float
    after: tuple[float, float, float]
    steps: int
    seconds: float


def outcome_of(run: Path, first: Path | None = None) -> Outcome:
    """Read what a run wrote, and perhaps the one it began with: its held-out episodes, or the first
    and last validation."""
    steps, seconds = Curve.of(run).seconds()[-1]
    held_out = sorted((run / "evaluations").glob("held_out_step_*.json"))
    if held_out:
        result = EvaluationResult.load(held_out[-1])
        before = math.nan if first is None else outcome_of(first).after[0]
        return Outcome(before, (result.success_rate, *result.interval), int(steps), seconds)
    validations = sorted((run / "evaluations").glob("validation_step_*.json"))
    begun, ended = (
        TextEvaluationResult.load(path).estimate("pass@1")
        for path in (validations[0], validations[-1])
    )
    return Outcome(begun.value, (ended.value, ended.low, ended.high), int(steps), seconds)


def table(runs: list[Path], firsts: list[Path], level: float, gain: float | None) -> None:
    """Print what each seed reached, and how many reached what was wanted."""
    print("\n| seed | before | held-out success (95 % interval) | steps | training seconds |")
    print("|---|---|---|---|---|")
    reached = 0
    for seed, run in enumerate(runs):
        found = outcome_of(run, firsts[seed] if firsts else None)
        rate, low, high = found.after
        reached += rate >= level if gain is None else rate - found.before >= gain
        before = "" if math.isnan(found.before) else f"{found.before:.2f}"
        print(
            f"| {seed} | {before} | {rate:.2f} ({low:.2f} to {high:.2f}) "
            f"| {found.steps} | {found.seconds:.0f} |"
        )
    wanted = f"{level}" if gain is None else f"a rise of {gain}"
    print(f"\n{reached} of {len(runs)} seeds reach {wanted} on what they never trained on")


def compare(runs: list[Path], others: list[Path]) -> None:
    """Print how far two sets of runs, paired by seed, lie apart along their learning curves."""
    means = [[_mean_success(run) for run in each] for each in (runs, others)]
    differences = [other - own for own, other in zip(*means, strict=True)]
    half = 0.0
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        half = float(student.ppf(0.975, len(differences) - 1)) * error
    speeds = [statistics.median(_steps_per_second(run) for run in each) for each in (runs, others)]
    print("\nmean success of all evaluations of a run, by seed:")
    for name, each in zip(("recipe", "beside"), means, strict=True):
        print(f"  {name}: {', '.join(f'{value:.3f}' for value in each)}")
    mean = statistics.mean(differences)
    print(f"  difference: {mean:+.3f} ± {half:.3f} (95 % interval of the mean)")
    print(
        f"steps per second: {speeds[1]:.0f} beside {speeds[0]:.0f}: {speeds[1] / speeds[0]:.2f} x"
    )


def _mean_success(run: Path) -> float:
    return statistics.mean(value for _, value in Curve.of(run).series(EVAL_SUCCESS))


def _steps_per_second(run: Path) -> float:
    steps, seconds = Curve.of(run).seconds()[-1]
    return steps / seconds


def main() -> None:
    """Train every seed, print the table, draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--level", type=float, default=0.9, help="success rate to be reached")
    parser.add_argument("--gain", type=float, help="rise of the rate to be reached, instead")
    parser.add_argument("--first", metavar="RECIPE", help="begin with what this one leaves behind")
    parser.add_argument("--given", nargs="+", default=[], metavar="KEY=VALUE", help="of --first")
    parser.add_argument("--directory", type=Path, help="keep runs here, or take them from here")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--beside", nargs="+", metavar="KEY=VALUE", help="train with these too")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_intermixed_args()
    with ExitStack() as stack:
        directory = arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        firsts: list[Path] = []
        runs: dict[str, list[Path]] = {arguments.recipe: []}
        if arguments.beside:
            runs[" ".join(arguments.beside)] = []
        for seed in range(arguments.seeds):
            begun = list[str]()
            if arguments.first:
                firsts.append(train(arguments.first, seed, arguments.given, directory / "first"))
                begun = [f"model.weights={firsts[-1] / 'policy.safetensors'}"]
            for number, (each, more) in enumerate(
                zip(runs.values(), ([], arguments.beside), strict=False)
            ):
                words = [*begun, *arguments.overrides, *more]
                each.append(train(arguments.recipe, seed, words, directory / f"{number}"))
        for each in runs.values():
            table(each, firsts, arguments.level, arguments.gain)
        if arguments.beside:
            compare(*runs.values())
        if arguments.picture is not None:
            print(f"curves: {overlay_curves(runs, arguments.picture)}")


if __name__ == "__main__":
    main()
