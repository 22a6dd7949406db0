"""Simulated step times of published settings: which placement wins at which size.

    python benchmarks/simulation.py                                   # all scenarios
    python benchmarks/simulation.py --scenario math-1.5b --staleness 1
    python benchmarks/simulation.py --scenario math-1.5b --clusters 256x8:H100

Nothing is measured here. Where the figures of a scenario are from is printed before its table, and
per figure written in benchmarks/scenarios.yaml.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from scenarios import find_scenario, run_scenario, scenarios, table

from rlinf.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", choices=sorted(scenarios()))
    parser.add_argument("--clusters", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, least in (("steps", 1), ("staleness", 0), ("seed", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)} is not possible; nearest: {least}")
    try:
        simulate(arguments)
    except UserError as error:
        parser.error(str(error))


def simulate(arguments: argparse.Namespace) -> None:
    """Print the tables of the scenarios that are asked for."""
    for name in [arguments.scenario] if arguments.scenario else sorted(scenarios()):
        print(f"SIMULATED, not measured: {name}\n{find_scenario(name).about}")
        begin = time.perf_counter()
        rows = table(
            run_scenario(
                name,
                clusters=tuple(arguments.clusters),
                steps=arguments.steps,
                staleness=arguments.staleness,
                seed=arguments.seed,
            )
        )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        print(f"planned and simulated in {time.perf_counter() - begin:.1f} s\n")


if __name__ == "__main__":
    main()
