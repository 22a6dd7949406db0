"""``rlinf plan RECIPE [key=value …]``: where a recipe runs fastest, or what memory it needs."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.run_paths import check_file_writable
from rlinf.cli.screen import complain, say, show_table
from rlinf.cli.train import Overrides
from rlinf.config.load import load_recipe
from rlinf.config.ranges import device_ranges
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.cli.simulated_plan import Asked
    from rlinf.cli.tasks import AnyTask
    from rlinf.planner.cluster_shape import ClusterShape
    from rlinf.planner.profile import Profile
    from rlinf.planner.search import Planned

_ALTERNATIVES = 3
_DIFFERENCES = 3
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
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Steps to simulate under the plan; default: 20."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="lognormal:MEAN:SIGMA:MAX",
            help="Tokens of answers in the simulation; default: by the limit of the recipe.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the simulated steps to this file, as a run does.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the plan to this file, for cluster.plan.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Run the worst step and say what memory it takes.")
    ] = False,
    limit: Annotated[
        str | None, typer.Option(metavar="8G", help="With --memory: what there is; default: free.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Find the fastest placement of a recipe from measurements, and simulate it; or check that it
    fits in memory."""
    from rlinf.cli.simulated_plan import asked_for
    from rlinf.cli.tasks import read_config, require_training
    from rlinf.config.named_files import at_absolute_paths
    from rlinf.config.validate import check
    from rlinf.flow.placed_config import NOT_PLANNED
    from rlinf.planner.cluster_shape import parse_cluster_shape

    task, loaded, config = read_config(recipe, overrides or [])
    require_training(task, recipe)
    if config.cluster.slow_links() is not None and not memory:
        told = f"{NOT_PLANNED}; drop it: ~cluster.net_emulation"
        raise ConfigError(told, key="cluster.net_emulation")
    alone = not (measure or profile or cluster or steps or lengths or timeline or save)
    _check_together(measure=measure, profile=profile, memory=memory, alone=alone, limit=limit)
    _check_apart(save, timeline)
    given = None if profile is None else _read_profile(profile)
    bytes_there = None if limit is None else _bytes(limit)
    shape = None if cluster is None else parse_cluster_shape(cluster)
    check(config, loaded)
    config = at_absolute_paths(config)  # as a run, whose measurements are kept
    if memory:
        _show_memory(task, config, bytes_there)
        return
    if save is not None:
        check_file_writable(save, "--save", "plan.yaml", b"\ncomponents:")
    asked = asked_for(config, steps=steps, lengths=lengths, timeline=timeline)
    words = [recipe, *(overrides or [])]
    found = _profile(task, config, words, measure=measure, given=given)
    _show_plan(task, config, found, shape, words, asked=asked, save=save)


def _check_together(
    *, measure: bool, profile: Path | None, memory: bool, alone: bool, limit: str | None
) -> None:
    """Refuse options that exclude each other."""
    if limit is not None and not memory:
        raise ConfigError("--limit has no effect without --memory")
    if profile is not None and measure:
        raise ConfigError("--measure and --profile exclude each other: one makes what one reads")
    if memory and not alone:
        raise ConfigError("--memory runs the recipe as it is placed; give it alone")


def _check_apart(save: Path | None, timeline: Path | None) -> None:
    """Refuse one file for both, of which the later one would take the place of the other."""
    if save is not None and timeline is not None and save.resolve() == timeline.resolve():
        raise ConfigError(
            f"--save and --timeline both name '{save}', where only one of them can be; give each "
            "a file of its own, such as plan.yaml and timeline.json"
        )


def _bytes(text: str) -> int:
    """``512M``, ``8G`` or ``8GiB`` in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--limit = '{text}' is no amount of memory; write 512M or 8G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


# -- the plan -----------------------------------------------------------------------------------


def _read_profile(path: Path) -> Profile:
    """The measurements in a file; before anything that takes longer."""
    from rlinf.planner.measure import PROFILE_FILE
    from rlinf.planner.profile import Profile

    if path.is_dir():
        inside = path / PROFILE_FILE
        known = inside.is_file()
        nearest = f"nearest: {inside}" if known else f"give a file, such as {PROFILE_FILE} of a run"
        raise ConfigError(f"--profile = '{path}' is a directory; {nearest}")
    return Profile.load(path)


def _profile(
    task: AnyTask, config: Any, words: list[str], *, measure: bool, given: Profile | None
) -> Profile:
    """The profile to plan with, measured if asked for."""
    from rlinf.planner import kept_profiles, profiling
    from rlinf.runners.run import Run

    if given is not None:
        for difference in kept_profiles.fingerprints(config).differences(given):
            complain(f"--profile: {difference}", label="note")
        return given
    kept, why = kept_profiles.usable_profile(config)
    if measure:
        measured = profiling.measure(config, partial(Run, task), task.flow, say=say)
        try:
            say(f"profile: {kept_profiles.keep_profile(measured, config.task)}\n")
        except OSError as error:  # what was measured is there, so that it can be planned with
            told = kept_profiles.why_not_kept(error)
            complain(f"the profile was not kept ({told})", label="warning")
            return measured
        kept, _ = kept_profiles.usable_profile(config)
        return kept or measured
    if kept is None:
        told = "; ".join(why[:_DIFFERENCES])
        more = f"; and {len(why) - _DIFFERENCES} more" if len(why) > _DIFFERENCES else ""
        reason = f"the kept profile is not valid here: {told}{more}" if why else "none is kept"
        raise ConfigError(
            f"there are no measurements to plan {words[0]} with ({reason}). Measure it: "
            f"{shlex.join(['rlinf', 'plan', *words, '--measure'])}, "
            "or give measurements with --profile FILE"
        )
    return kept


def _show_plan(
    task: AnyTask,
    config: Any,
    profile: Profile,
    shape: ClusterShape | None,
    words: list[str],
    *,
    asked: Asked,
    save: Path | None = None,
) -> None:
    from rlinf.cli.simulated_plan import show_simulation
    from rlinf.planner.cluster_shape import cluster_of

    found, notes, command = _solved(task, config, profile, shape, save)
    wanted = shape or cluster_of(config)
    units = [_unit(config, profile, group.kind, own=shape is None) for group in wanted.groups]
    show_table(f"plan for {_machine(wanted, units)}", *_plan_table(found))
    beside = profile.fixed_seconds
    say(f"\npredicted step: {found.seconds:.4g} s, {found.plan.mode}: {found.shape}")
    say(f"of this, weights and driver: {beside:.3g} s")
    if shape is None:
        _say_measured(config, profile, found)
    for unit, peak in zip(units, found.peak_bytes.values(), strict=True):
        say(f"predicted memory of one {unit}: {_measured_mib(peak)}")
    # Components are threads of one process, whose memory cannot be told apart.
    grows = config.cluster.runtime == "local" and not config.on_accelerators
    if any(found.peak_bytes.values()) and grows:
        say(
            "memory is how far the one process of the runtime `local` grew while a component ran; "
            "what it held before is not in it. cluster.runtime=ray measures whole processes"
        )
    for words_of in found.extended:
        say(f"not measured: {words_of}")
    for note in notes:
        say(note)
    if found.alternatives:
        say("\nalternatives:")
    for place, other in enumerate(found.alternatives[:_ALTERNATIVES], start=1):
        say(f"{place}. {_alternative(found, other)}")
    show_simulation(config, task.flow(config), found, profile, wanted, asked=asked)
    if save is not None:
        try:
            found.plan.save(save)
        except OSError as error:
            raise ConfigError(f"--save = '{save}' was not written: {error.strerror}") from error
        say(f"\nplan: {save}")
    if command is not None:
        needed = _needed(words[0], [*words[1:], *command])
        say(f"\nrun it: {shlex.join(['rlinf', 'train', words[0], *needed])}")


def _say_measured(config: Any, profile: Profile, found: Planned) -> None:
    """What a step of the recipe took as it is, where that was measured; and whether it is less."""
    from rlinf.planner.kept_profiles import measured_step

    taken = measured_step(config, profile)
    if taken is None:
        return
    say(f"measured step of the recipe as it is: {taken:.4g} s")
    slower = 100 * (found.seconds / taken - 1)
    if slower > 0 and not found.plan.same_places(config.plan):
        say(f"this plan is predicted to take {slower:.1f} % longer; keep the recipe's placement")


def _needed(recipe: str, overrides: list[str]) -> list[str]:
    """Overrides without those that others behind them cancel."""
    wanted, needed = load_recipe(recipe, overrides).data, overrides
    for one in overrides:
        without = {one}
        if one[0] == "~" and one in needed:
            # What is dropped goes with what set it, which stands before.
            own = re.compile(rf"{re.escape(one[1:])}[.=]")
            without |= set(filter(own.match, needed[: needed.index(one)]))
        fewer = [other for other in needed if other not in without]
        try:
            if load_recipe(recipe, fewer).data == wanted:
                needed = fewer
        except ConfigError:  # a later one drops what it sets
            continue
    return needed


def _solved(
    task: AnyTask, config: Any, profile: Profile, shape: ClusterShape | None, save: Path | None
) -> tuple[Planned, list[str], list[str] | None]:
    """The fastest plan, what else is to be said, and the overrides that run it, if any do."""
    from rlinf.planner.cluster_shape import cluster_overrides
    from rlinf.planner.planned import command_overrides, find_accepted_plan, find_plan

    flow = task.flow(config)
    if shape is not None:
        try:
            cluster_overrides(config, shape)
        except ConfigError as error:
            return find_plan(config, flow, profile, cluster=shape), [f"no run: {error}"], None
    solved = find_accepted_plan(config, flow, profile, cluster=shape)
    notes = [solved.passed_over] if solved.passed_over else []
    file = "" if save is None else str(save)
    return solved.found, notes, command_overrides(config, solved.found.plan, shape, file=file)


def _unit(config: Any, profile: Profile, kind: str, *, own: bool) -> str:
    """What a device of a cluster is; without a kind, one like those that were measured."""
    from rlinf.planner.cluster_shape import CPU

    [measured] = profile.kinds if len(profile.kinds) == 1 else [""]
    kind = kind or measured
    if kind == CPU:
        return "CPU slot" if not own or config.cluster.cpu_devices_per_node else "device"
    return kind or ("accelerator" if own and config.on_accelerators else "device")


def _machine(shape: ClusterShape, units: list[str]) -> str:
    """A cluster as a person would say it: ``1 node × 2 CPU slots``."""

    def count(number: int, what: str) -> str:
        name = what not in ("node", "CPU slot", "accelerator", "device")
        return f"{number} {what}{'' if number == 1 or name else 's'}"

    return " + ".join(
        f"{count(group.nodes, 'node')} × {count(group.devices_per_node, unit)}"
        for group, unit in zip(shape.groups, units, strict=True)
    )


def _plan_table(found: Planned) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    columns = (
        "component", "devices", "processes", "when idle", "stages", "seconds",
        "memory per device", "reason",
    )  # fmt: skip
    return columns, [
        (
            name, device_ranges(part.devices), str(part.processes), part.residency,
            str(part.pipeline_stages), f"{part.predicted_seconds or 0:.3g}",
            _measured_mib(part.predicted_bytes), part.reason,
        )
        for name, part in found.plan.components.items()
    ]  # fmt: skip


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


def _show_memory(task: AnyTask, config: Any, limit: int | None) -> None:
    from rlinf.planner.preflight import nearest_fitting, preflight
    from rlinf.runners.run import Run

    runner = partial(Run, task)
    report = preflight(config, runner, task.flow, limit)
    large = [each for each in report.processes if each.peak >= 2**20]
    rows = [(process.role, _mib(process.peak)) for process in large]
    show_table("most memory of each process in the worst step", ("process", "peak"), rows)
    say(f"\nall at the same time: {_mib(report.total)}; there is: {_mib(report.limit)}")
    for each in report.devices:
        say(f"device {each.device}: {_mib(each.peak)}; it has: {_mib(each.limit)}")
    if report.fits:
        say("it fits")
        return
    why = "" if report.ended is None else f": {report.ended} before the step ended"
    say(f"\nit does not fit{why}; looking for what does")
    found = nearest_fitting(config, runner, task.flow, report, say=say)
    if found is None:
        raise ConfigError(
            f"the worst step needs {report.share} of what there is, and no smaller batch, length "
            "or number of items that was tried fits; use a smaller model or a larger machine"
        )
    raise ConfigError(
        f"the worst step needs {report.share} of what there is; nearest that fits: "
        f"{found.change} ({_mib(found.total)})"
    )


def _measured_mib(count: float | None) -> str:
    """Memory that a profile may say nothing of."""
    return _mib(count) if count else "not measured"


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB" if count >= 2**20 else f"{count / 2**10:,.0f} KiB"
