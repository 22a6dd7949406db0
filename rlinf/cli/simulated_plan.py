"""What ``rlinf plan`` says about the steps that it simulates under the plan that it found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.cli.run_paths import check_file_writable
from rlinf.cli.screen import say
from rlinf.config.ranges import device_ranges
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.flow.graph import Flow
    from rlinf.planner.cluster_shape import ClusterShape
    from rlinf.planner.profile import Profile
    from rlinf.planner.search import Planned
    from rlinf.planner.simulation import DeviceGroup, LengthDistribution, Simulation

LABEL = "SIMULATED"


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line: steps, and what is known of the lengths of answers,
    also in words (empty where no text is generated), and where to write the events."""

    steps: int
    lengths: LengthDistribution | None
    words: str
    timeline: Path | None


def asked_for(
    config: Any, *, steps: int | None, lengths: str | None, timeline: Path | None
) -> Asked:
    """Check the options before anything is measured."""
    from rlinf.planner.simulation import parse_lengths
    from rlinf.planner.simulation.simulate import SIMULATED_STEPS, lengths_of

    if timeline is not None:
        check_file_writable(timeline, "--timeline", "timeline.json", b'{"ph"')
    try:
        wanted = None if lengths is None else parse_lengths(lengths)
        used = lengths_of(config.planning, wanted)
    except ConfigError as error:
        raise ConfigError(f"--lengths: {error}") from error
    words = "" if used is None else f"{used} ({used.origin or 'as given'})"
    return Asked(steps or SIMULATED_STEPS, wanted, words, timeline)


def show_simulation(
    config: Any,
    flow: Flow,
    planned: Planned,
    profile: Profile,
    cluster: ClusterShape,
    *,
    asked: Asked,
) -> None:
    """Simulate steps under a plan and say what they took; write their timeline if asked for."""
    from rlinf.planner.simulation import idle_shares
    from rlinf.planner.simulation.simulate import simulate_planned

    found = simulate_planned(
        config, flow, planned, profile, cluster,
        steps=asked.steps, lengths=asked.lengths, timeline=asked.timeline is not None,
    )  # fmt: skip
    low, middle, high = found.quantiles(0.1, 0.5, 0.9)
    count = len(found.steady_seconds)
    say(
        f"\n{LABEL} step: median {middle:.4g} s, 10–90 %: {low:.4g}–{high:.4g} s "
        f"({count} step{'' if count == 1 else 's'}, not measured)"
    )
    if asked.words:
        say(f"{LABEL} with answers of {asked.words}; generation takes what the profile says")
    for group in idle_shares(found, planned.plan, cluster):
        say(f"{LABEL} idle: {_idle(group)}")
    if asked.timeline is not None:
        _write(found, asked.timeline)
        say(f"{LABEL} timeline: {asked.timeline}")


def _idle(group: DeviceGroup) -> str:
    """The idle share of some devices, and whose they are."""
    owners = ", ".join(group.components) or "nothing on them"
    many = "s" if len(group.devices) > 1 else ""
    return f"{100 * group.idle:.1f} % of device{many} {device_ranges(group.devices)} ({owners})"


def _write(found: Simulation, path: Path) -> None:
    """Replace a file by the timeline of a simulation."""
    from rlinf.monitor.timeline import TimelineFile

    # Beside it at first: a timeline file is continued where there is one.
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        with TimelineFile(temporary) as file:
            file.write(found.events)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--timeline = '{path}' was not written: {error.strerror}") from error
