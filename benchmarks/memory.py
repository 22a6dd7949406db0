"""What the memory preflight says beside what the run holds, and their ratio.

    python benchmarks/memory.py                        # both tasks
    python benchmarks/memory.py quickstart             # one recipe
    python benchmarks/memory.py quickstart seed=1      # with overrides

The preflight is ``rlinf plan RECIPE --memory``, whose figure for all processes at the same time
counts. The run (``rlinf train RECIPE``) is watched from outside: for every process the PSS and the
kernel's record of its peak, a few times per second. It is a real one, with its evaluations,
checkpoints and conclusion; ``STEPS`` training steps long.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlinf.monitor.memory import TreeWatch

COMMAND = [sys.executable, "-c", "from rlinf.cli.main import main; raise SystemExit(main())"]
STEPS = 12
RECIPES = {
    "quickstart": [f"runner.total_env_steps={1024 * STEPS}", "evaluation.stop_at_success=null"],
    "reasoning/arithmetic_grpo": [f"runner.total_steps={STEPS}", "warm_start.steps=60"],
}


def watched(words: Sequence[str]) -> int:
    """Most memory of a program and all that it starts [bytes]."""
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL)
    with TreeWatch(process.pid) as watch:
        code = process.wait()
    if code:
        raise SystemExit(f"rlinf {' '.join(words)} ended with {code}")
    return watch.together


def told(words: Sequence[str]) -> int:
    """What a preflight says that all processes hold together [bytes]."""
    shown = subprocess.run([*COMMAND, *words], stdout=subprocess.PIPE, text=True, check=True).stdout
    [figure] = re.findall(r"all at the same time: ([\d,]+) MiB", shown)
    return int(figure.replace(",", "")) * 2**20


def compare(recipe: str, overrides: list[str]) -> dict[str, float]:
    """The figure of the preflight and the peak of the run [MiB], and how far apart they are."""
    preflight = told(["plan", recipe, *overrides, "--memory"])
    with tempfile.TemporaryDirectory() as directory:
        run = watched(["train", recipe, *overrides, "--run-dir", str(Path(directory) / "run")])
    return {
        "preflight_mib": round(preflight / 2**20),
        "run_mib": round(run / 2**20),
        "ratio": round(preflight / run, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", help="default: one recipe of each task")
    parser.add_argument("overrides", nargs="*", help="key=value …")
    given = parser.parse_args()
    recipes = [given.recipe] if given.recipe else list(RECIPES)
    for recipe in recipes:
        figures = compare(recipe, [*RECIPES.get(recipe, []), *given.overrides])
        print(json.dumps({"recipe": recipe, **figures}), flush=True)


if __name__ == "__main__":
    main()
