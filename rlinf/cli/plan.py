"""``rlinf plan RECIPE [key=value …]``: where a recipe runs fastest, or what memory it needs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.screen import complain, say, show_table
from rlinf.cli.train import Overrides
from rlinf.config.ranges import device_ranges
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.cli.tasks import Task
    from rlinf.flow.cluster_shape import ClusterShape
    from rlinf.flow.planning import Planned
    from rlinf.flow.profile import Profile

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def plan(
    recipe: Annotated[str, typer.Argument(help="Name (`rlinf list recipes`) or file.")],
    overrides: Overrides = None,
    *,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the recipe for a few steps at several settings.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Measurements to plan with; default: those kept for you.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="512x8:H100", help="Plan for this cluster instead.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Run the worst step and say what memory it takes.")
    ] = False,
    limit: Annotated[
        str | None, typer.Option(metavar="8G", help="With --memory: what there is; default: free.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Find the fastest placement of a recipe from measurements; or check that it fits in memory."""
    from rlinf.cli.tasks import read_config, require_training
    from rlinf.config.validate import check

    task, loaded, config = read_config(recipe, overrides or [])
    require_training(task, recipe)
    if limit is not None and not memory:
        raise ConfigError("--limit has no effect without --memory")
    bytes_there = None if limit is None else _bytes(limit)
    shape = None if cluster is None else _shape(cluster)
    check(config, loaded)
    if memory:
        if measure or profile or cluster:
            raise ConfigError("--memory runs the recipe as it is placed; give it alone")
        _show_memory(task, config, bytes_there)
        return
    if measure and profile:
        raise ConfigError("--measure and --profile exclude each other: one makes what one reads")
    found = _profile(task, config, loaded.short_name, measure=measure, given=profile)
    words = [recipe, *(overrides or [])]
    _show_plan(task, config, found, shape, words)


def _shape(text: str) -> ClusterShape:
    from rlinf.flow.cluster_shape import parse_cluster_shape

    return parse_cluster_shape(text)


def _bytes(text: str) -> int:
    """``512M``, ``8G`` or ``8GiB`` in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--limit = '{text}' is no amount of memory; write 512M or 8G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


# -- the plan -----------------------------------------------------------------------------------


def _profile(task: Task, config: Any, recipe: str, *, measure: bool, given: Path | None) -> Profile:
    """The profile to plan with, measured if asked for."""
    from rlinf.flow.profile import Profile
    from rlinf.runners import kept_profiles, profiling

    if given is not None:
        found = Profile.load(given)
        for difference in kept_profiles.fingerprints(config).differences(found):
            complain(f"{given}: {difference}", label="note")
        return found
    kept, why = kept_profiles.usable_profile(config)
    if measure:
        measured = profiling.measure(config, task.load_runner(), task.flow, say=say)
        say(f"profile: {kept_profiles.keep_profile(measured, config.task)}\n")
        kept, _ = kept_profiles.usable_profile(config)
        return kept or measured
    if kept is None:
        reason = f"the kept profile is not valid here: {'; '.join(why)}" if why else "none is kept"
        raise ConfigError(
            f"there are no measurements to plan {recipe} with ({reason}). Measure it: rlinf plan "
            f"{recipe} --measure, or give measurements with --profile FILE"
        )
    return kept


def _show_plan(
    task: Task, config: Any, profile: Profile, shape: ClusterShape | None, words: list[str]
) -> None:
    from rlinf.runners.planned import cluster_of, command_overrides, find_plan

    found = find_plan(config, task.flow(config), profile, cluster=shape)
    unit = _unit(config) if shape is None else "device"
    wanted = shape or cluster_of(config)
    show_table(f"plan for {_machine(wanted, unit)}", *_plan_table(found))
    beside = profile.fixed_seconds
    say(f"\npredicted step: {found.seconds:.4g} s, {found.plan.mode}: {found.shape}")
    say(f"of this, weights and driver: {beside:.3g} s")
    for group, peak in zip(wanted.groups, found.peak_bytes.values(), strict=True):
        say(f"predicted memory of one {group.kind or unit}: {_measured_mib(peak)}")
    if any(found.peak_bytes.values()) and _measures_growth(config):
        say(
            "memory is how far the one process of the runtime `local` grew while a component ran; "
            "what it held before is not in it. cluster.runtime=ray measures whole processes"
        )
    for words_of in found.extended:
        say(f"not measured: {words_of}")
    if found.alternatives:
        say("\nalternatives:")
    for place, other in enumerate(found.alternatives, start=1):
        say(f"{place}. {_alternative(found, other)}")
    command = shlex.join(["rlinf", "train", *words, *command_overrides(config, found.plan)])
    say(f"\nrun it: {command}")


def _measures_growth(config: Any) -> bool:
    """Whether components are threads of one process, whose memory cannot be told apart."""
    return config.cluster.runtime == "local" and not config.on_accelerators


def _unit(config: Any) -> str:
    """What a device of a recipe's cluster is."""
    if config.cluster.cpu_devices_per_node:
        return "CPU slot"
    return "accelerator" if config.on_accelerators else "device"


def _machine(shape: ClusterShape, unit: str) -> str:
    """A cluster as a person would say it: ``1 node × 2 CPU slots``."""
    return " + ".join(
        f"{_count(group.nodes, 'node')} × "
        + (
            f"{group.devices_per_node} {group.kind}"
            if group.kind
            else _count(group.devices_per_node, unit)
        )
        for group in shape.groups
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _plan_table(found: Planned) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    columns = (
        "component", "devices", "processes", "when idle", "granularity", "stages", "seconds",
        "memory per device", "reason",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            name,
            device_ranges(part.devices),
            str(part.processes),
            part.residency,
            "all" if part.granularity is None else str(part.granularity),
            str(part.pipeline_stages),
            f"{part.predicted_seconds or 0:.3g}",
            _measured_mib(part.predicted_bytes),
            part.reason,
        )
        for name, part in found.plan.components.items()
    ]
    return columns, rows


def _alternative(best: Planned, other: Planned) -> str:
    """An alternative in one sentence: what it is, and why it is not the plan."""
    places = ", ".join(
        f"{name} on {device_ranges(part.devices)}" for name, part in other.plan.components.items()
    )
    slower = 100 * (other.seconds / best.seconds - 1)
    bound = next(
        (part.reason for part in other.plan.components.values() if "-bound" in part.reason), ""
    )
    unknown = "".join(
        f"; not measured: {words}" for words in other.extended if words not in best.extended
    )
    return f"{other.seconds:.4g} s ({slower:+.1f} %), {other.shape}: {places}; {bound}{unknown}"


# -- memory -------------------------------------------------------------------------------------


def _show_memory(task: Task, config: Any, limit: int | None) -> None:
    from rlinf.runners.preflight import nearest_fitting, preflight

    runner = task.load_runner()
    report = preflight(config, runner, task.flow, limit)
    rows = [(process.role, _mib(process.peak)) for process in report.processes]
    show_table("most memory of each process in the worst step", ("process", "peak"), rows)
    say(f"\nall at the same time: {_mib(report.total)}; there is: {_mib(report.limit)}")
    for each in report.devices:
        say(f"device {each.device}: {_mib(each.peak)}; it has: {_mib(each.limit)}")
    if report.fits:
        say("it fits")
        return
    say("\nit does not fit; looking for what does")
    found = nearest_fitting(config, runner, task.flow, report, say=say)
    if found is None:
        raise ConfigError(
            f"the worst step needs {100 * report.excess:.0f} % of what there is, and no smaller "
            "batch, length or number of items that was tried fits; use a smaller model or a larger "
            "machine"
        )
    raise ConfigError(
        f"the worst step needs {100 * report.excess:.0f} % of what there is; nearest that fits: "
        f"{found.change} ({_mib(found.total)})"
    )


def _measured_mib(count: float | None) -> str:
    """Memory that a profile may say nothing of."""
    return _mib(count) if count else "not measured"


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB" if count >= 2**20 else f"{count / 2**10:,.0f} KiB"
