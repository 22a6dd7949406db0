"""Train a recipe from scratch over several seeds: a table, and the learning curves in one picture.

    python benchmarks/recipe.py quickstart --seeds 5 --picture docs/pictures/quickstart.png

Each run is a process of its own, one after the other, as a user would start it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rlinf.data.evaluation import EvaluationResult
from rlinf.monitor.curve import Curve, overlay_curves

COMMAND = [sys.executable, "-c", "from rlinf.cli.main import main; raise SystemExit(main())"]


def train(recipe: str, seed: int, overrides: list[str], directory: Path) -> Path:
    """Run one seed; returns its run directory."""
    run = directory / f"seed_{seed}"
    subprocess.run(
        [*COMMAND, "train", recipe, *overrides, f"seed={seed}", "--run-dir", str(run)],
        check=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    return run


def result_of(run: Path) -> tuple[EvaluationResult, float, int]:
    """Held-out result, training seconds and environment steps of a run."""
    held_out = sorted((run / "evaluations").glob("held_out_step_*.json"))[-1]
    curve = Curve.of(run)
    steps, seconds = curve.seconds()[-1]
    return EvaluationResult.load(held_out), seconds, int(steps)


def main() -> None:
    """Train every seed, print the table, draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--level", type=float, default=0.9, help="success rate to be reached")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as directory:
        runs = [
            train(arguments.recipe, seed, arguments.overrides, Path(directory))
            for seed in range(arguments.seeds)
        ]
        print("\n| seed | held-out success (95 % interval) | env steps | training seconds |")
        print("|---|---|---|---|")
        reached = 0
        for seed, run in enumerate(runs):
            result, seconds, steps = result_of(run)
            low, high = result.interval
            reached += result.success_rate >= arguments.level
            print(
                f"| {seed} | {result.success_rate:.2f} ({low:.2f} to {high:.2f}) "
                f"| {steps} | {seconds:.0f} |"
            )
        print(f"\n{reached} of {len(runs)} seeds reach {arguments.level} on held-out episodes")
        if arguments.picture is not None:
            print(f"curves: {overlay_curves({arguments.recipe: runs}, arguments.picture)}")


if __name__ == "__main__":
    main()
