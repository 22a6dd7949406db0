"""Steps of this checkout beside those of another one, in one run: what a change of the code cost.

    python benchmarks/trees.py ../before                   # quickstart and reasoning
    python benchmarks/trees.py ../before --rounds 8 --recipe quickstart
    python benchmarks/trees.py ../before --program "embodied.py throughput --no-peer"

Both checkouts have an environment of their own in ``.venv`` (``make .venv/.dev``). They take
turns of a few steps of the same recipe and seed, each turn in a process of its own, and the first
steps of a turn do not count. Printed: the median seconds of a step in each, and the median over the
turns of the other's time divided by ours: above 1 this checkout is the faster one. Some metrics of
the last step are printed, too: the same program gives the same numbers. With ``--program`` each
checkout runs its own copy of a benchmark in its turns, and of every line that both print (equal but
for its numbers) the medians of the numbers that differ are printed, with ours divided by the
other's. One thread per process (``OMP_NUM_THREADS=1``) is set unless given.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]

RECIPES = {
    "quickstart": (
        "runner.total_env_steps=12288", "evaluation.interval=0",
        "evaluation.stop_at_success=null", "evaluation.episodes=10",
        "evaluation.video_episodes=0",
    ),
    "reasoning/arithmetic_grpo": (
        "runner.total_steps=8", "warm_start.steps=20", "validation.prompts=8",
        "validation.val_check_interval=0",
    ),
}  # fmt: skip
"""Overrides under which a turn is short."""

WARM_UP_STEPS = 2
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
COMPARED = ("actor/policy_loss", "actor/grad_norm", "env/return", "rollout/rewards")


def environment() -> dict[str, str]:
    """Variables of a turn: one thread, and nothing fetched from a hub."""
    return {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
    }  # fmt: skip


def turn(tree: Path, recipe: str, overrides: list[str]) -> list[dict[str, float]]:
    """Train in a checkout; the metrics of each step."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [tree / ".venv/bin/rlinf", "train", recipe, *overrides, "--run-dir", run]
        done = subprocess.run(
            [*map(str, command)], env=environment(), cwd=tree, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{recipe} failed in {tree}:\n{done.stdout}\n{done.stderr}")
        lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    found = [row.get("metrics", row) for row in rows]
    return [row for row in found if "time/step" in row]


def compare(other: Path, recipe: str, overrides: list[str], rounds: int) -> None:
    """Let both checkouts take turns, and print what came of it."""
    seconds: dict[Path, list[float]] = {HERE: [], other: []}
    ratios, last = [], {}
    for number in range(rounds):
        order = (HERE, other) if number % 2 else (other, HERE)
        medians = {}
        for tree in order:
            rows = turn(tree, recipe, overrides)
            steps = [row["time/step"] for row in rows[WARM_UP_STEPS:]]
            seconds[tree] += steps
            medians[tree], last[tree] = statistics.median(steps), rows[-1]
        ratios.append(medians[other] / medians[HERE])
    ours, theirs = (statistics.median(seconds[tree]) for tree in (HERE, other))
    print(f"{recipe}: this checkout {ours:.3f} s a step, the other {theirs:.3f} s")
    turns = " ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"  ratio {statistics.median(ratios):.3f} (turns: {turns})")
    for name in COMPARED:
        if name in last[HERE] and name in last[other]:
            print(f"  {name}: {last[HERE][name]:.9g} here, {last[other][name]:.9g} there")


def figures(tree: Path, program: list[str]) -> dict[str, list[float]]:
    """Run a benchmark of a checkout; the numbers of each line printed, by its text."""
    command = [tree / ".venv/bin/python", f"benchmarks/{program[0]}", *program[1:]]
    done = subprocess.run(
        [*map(str, command)], env=environment(), cwd=tree, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{shlex.join(program)} failed in {tree}:\n{done.stdout}\n{done.stderr}")
    found: dict[str, list[float]] = {}
    heading = ""
    for line in done.stdout.splitlines():
        text = " ".join(NUMBER.sub("#", line).split())
        numbers = [float(number) for number in NUMBER.findall(line)]
        if numbers:
            found.setdefault(heading + text, numbers)
        else:
            heading = f"{text} | "
    return found


def compare_program(other: Path, program: list[str], rounds: int) -> None:
    """Let both checkouts run their copy of a benchmark in turns, and print what came of it."""
    found: dict[Path, list[dict[str, list[float]]]] = {HERE: [], other: []}
    for number in range(rounds):
        for tree in (HERE, other) if number % 2 else (other, HERE):
            found[tree].append(figures(tree, program))
    print(f"{shlex.join(program)}: this checkout, the other, ours / theirs")
    for line in found[HERE][0]:
        ours, theirs = ([turn[line] for turn in found[t] if line in turn] for t in (HERE, other))
        if not theirs:
            continue
        print(f"  {line}", flush=True)
        for mine, its in zip(_medians(ours), _medians(theirs), strict=True):
            ratio = f"{mine / its:.3f}" if its else "-"
            if mine != its:
                print(f"    {mine:12.4g} {its:12.4g} {ratio:>7}")


def _medians(turns: list[list[float]]) -> list[float]:
    """The median over the turns of each number of a line."""
    return [statistics.median(values) for values in zip(*turns, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="The other checkout.")
    parser.add_argument("--recipe", choices=[*RECIPES], action="append")
    parser.add_argument("--rounds", type=int, default=4, help="Turns of each checkout.")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--program", metavar="COMMAND", help="A benchmark that both have.")
    arguments = parser.parse_args()
    if arguments.program:
        program = shlex.split(arguments.program)
        compare_program(arguments.other.resolve(), program, arguments.rounds)
        return
    for recipe in arguments.recipe or RECIPES:
        overrides = [*RECIPES[recipe], *arguments.override]
        compare(arguments.other.resolve(), recipe, overrides, arguments.rounds)


if __name__ == "__main__":
    main()
