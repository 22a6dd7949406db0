"""``rlinf data show|stats SET``: what is in a set of demonstrations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.screen import say, show_table
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from rlinf.data.demonstrations import EpisodeInfo
    from rlinf.data.lerobot.reader import LeRobotEpisode, LeRobotSet
    from rlinf.data.vector_statistics import Parts

_MOST_AT_ONCE = 10_000
"""Actions; each is compared with the state that all were chosen in."""

app = typer.Typer(help="Look at sets of demonstrations.", no_args_is_help=True)
_Set = Annotated[
    Path, typer.Argument(metavar="SET", help="A directory: of `rlinf record`, or a LeRobot set.")
]


@app.callback()
def _group() -> None:
    """Look at sets of demonstrations."""


@app.command("show")
def show(path: _Set, debug: Debug = False) -> None:
    """Show the episodes, tasks and features of a set."""
    from rlinf.data.demonstrations import Demonstrations
    from rlinf.data.lerobot.layout import INDICES, SUCCESS, is_lerobot
    from rlinf.data.lerobot.reader import LeRobotSet

    path = path.expanduser()
    if is_lerobot(path):
        found = LeRobotSet(path)
        lengths = [each.length for each in found.episodes]
        success: Sequence[bool] | None = found.success if SUCCESS in found.features else None
        tasks = _tasks(found.texts, found.text_numbers, found.episodes)
        features = [(name, each.dtype, "×".join(map(str, each.shape)))
                    for name, each in found.features.items() if name not in INDICES]  # fmt: skip
        kind = f"LeRobot {found.info['codebase_version']}, {found.fps:g} frames a second"
    else:
        ours = Demonstrations.load(path)
        lengths = [each.length for each in ours.episodes]
        success, kind = [each.success for each in ours.episodes], "rlinf"
        tasks = _tasks(*ours.row_texts(), ours.episodes)
        arrays = {**ours.observations, "actions": ours.actions, "rewards": ours.rewards}
        features = [(name, each.dtype.name, "×".join(map(str, each.shape[1:])))
                    for name, each in arrays.items()]  # fmt: skip
    good = "success is not recorded" if success is None else f"{sum(success)} successful"
    say(f"{path}: {kind}; {len(lengths)} episodes ({good}) of {min(lengths)} to "
        f"{max(lengths)} steps, {sum(lengths)} together\n")  # fmt: skip
    show_table("tasks", ("task", "episodes"), [(text or "–", str(n)) for text, n in tasks.items()])
    show_table("features", ("feature", "type", "shape"), features)


def _tasks(
    texts: Sequence[str], numbers: np.ndarray, episodes: Sequence[EpisodeInfo | LeRobotEpisode]
) -> Counter[str]:
    """Of how many episodes each text is, in one step or another; ``numbers`` are those of rows."""
    return Counter(
        texts[number]
        for each in episodes
        for number in dict.fromkeys(numbers[each.first :][: each.length].tolist())
    )


@app.command("stats")
def stats(
    path: _Set,
    *,
    out: Annotated[
        Path | None, typer.Option(help="Write them to this file, as norm_stats.json of openpi.")
    ] = None,
    deltas: Annotated[
        str,
        typer.Option(
            metavar="DIMENSIONS",
            help="Such as 0,1,2: dimensions that the model tells as distances from the state.",
        ),
    ] = "",
    horizon: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_AT_ONCE,
            help="With --deltas: how many actions the model gives at once.",
        ),
    ] = None,
    actions: Annotated[
        str | None,
        typer.Option(
            metavar="FEATURE", help="Of a LeRobot set: what the actions are called; else `action`."
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="FEATURE",
            help="Of a LeRobot set: what the states are called; else `observation.state`, if any.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Show the statistics of actions and states, with exact quantiles."""
    from rlinf.cli.run_paths import check_file_writable
    from rlinf.data.vector_statistics import vector_statistics

    if out is not None:
        check_file_writable(out, "--out", "norm_stats.json", b'"norm_stats"')
    if bool(deltas) != (horizon is not None):
        raise ConfigError(
            "--deltas and --horizon go together: distances from a state are those of all actions "
            "that the model gives at once there; nearest: both, as --deltas 0,1,2 --horizon 50"
        )
    names = ("mean", "std", "min", "max", "q01", "q99")
    found = {}
    named = {"actions": actions, "state": state}
    vectors = _vectors(path.expanduser(), _dimensions(deltas), horizon or 1, named)
    for name, parts in vectors.items():
        try:
            found[name] = vector_statistics(parts)
        except ValueError as error:
            raise ConfigError(f"{path}: {name} {error}") from error
        rows = [(str(number), *(f"{found[name][each][number]:.4g}" for each in names))
                for number in range(len(found[name]["mean"]))]  # fmt: skip
        show_table(name, ("dimension", *names), rows)
    if out is not None:
        import json

        from rlinf.checkpoint.files import write_atomic

        content = {name: {key: each[key].tolist() for key in names} for name, each in found.items()}
        write_atomic(out, (json.dumps({"norm_stats": content}, indent=1) + "\n").encode())
        say(
            f"\nwritten to {out}; a recipe of a vision-language-action model takes it as "
            "model.statistics"
        )


def _dimensions(given: str) -> list[int]:
    """Of an option, such as 0,1,2; ConfigError."""
    numbers = [each.strip() for each in given.split(",")] if given else []
    if not all(each.isdecimal() for each in numbers):
        raise ConfigError(f"--deltas = '{given}': must be whole numbers from 0, such as 0,1,2")
    return [int(each) for each in numbers]


def _vectors(
    path: Path, deltas: Sequence[int], horizon: int, named: Mapping[str, str | None]
) -> dict[str, Parts]:
    """Actions and, where there are some, states, by the features that are ``named``; ConfigError
    where the set has no such feature."""
    import numpy as np

    from rlinf.data.demonstrations import Demonstrations
    from rlinf.data.lerobot.layout import is_lerobot
    from rlinf.data.lerobot.reader import LeRobotSet
    from rlinf.data.vector_statistics import at_once, delta_parts

    found: Demonstrations | LeRobotSet
    if is_lerobot(path):
        found = LeRobotSet(path)
        vectors = _feature_vectors(found, named)
    else:
        for key in (key for key, name in named.items() if name is not None):
            raise ConfigError(
                f"names a feature of a LeRobot set, and {path} is a set of rlinf record; nearest: "
                "leave it out",
                key=f"--{key}",
            )
        found = Demonstrations.load(path)
        arrays = {"actions": found.actions, "state": found.observations.get("states")}
        vectors = {key: at_once(array) for key, array in arrays.items() if array is not None}
    if deltas:
        actions, states = (
            np.concatenate(list(vectors[key]())) if key in vectors else np.zeros((0, 0))
            for key in ("actions", "state")
        )
        known = min(actions.shape[1], states.shape[1])
        if max(deltas) >= known:
            raise ConfigError(
                f"--deltas names dimension {max(deltas)}; {path} has {known} that actions and "
                "states share"
            )
        spans = [(each.first, each.length) for each in found.episodes]
        vectors["actions"] = delta_parts(actions, states, spans, deltas, horizon)
    return vectors


def _feature_vectors(found: LeRobotSet, named: Mapping[str, str | None]) -> dict[str, Parts]:
    from rlinf.data.lerobot.layout import ACTION, STATE

    own = {"actions": ACTION, "state": STATE if STATE in found.features else None}
    vectors = {}
    for key, name in own.items():
        if (feature := named[key] or name) is None:
            continue  # a set may show pictures alone
        try:
            vectors[key] = found.vector_parts(feature)
        except ConfigError as error:
            raise ConfigError(error.reason, key=f"--{key}") from error
    return vectors
