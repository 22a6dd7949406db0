"""Evaluation as a contract: a file says what is played or answered, results carry its hash."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rlinf.checkpoint.files import is_disk_full
from rlinf.checkpoint.manifest import MANIFEST
from rlinf.config.dump import to_data
from rlinf.config.load import load_recipe
from rlinf.config.named_files import LATEST, fingerprint, named_files
from rlinf.config.validate import validate
from rlinf.data.played_episodes import PlayedEpisodes
from rlinf.data.specifications import HashedSpec, SpecifiedResult
from rlinf.data.specifications import compare as compare_results
from rlinf.errors import CheckpointError, ConfigError, RunFailure
from rlinf.flow.placed_config import PlacedConfig
from rlinf.monitor.run_directory import CONFIG_FILE
from rlinf.monitor.run_origin import Origin
from rlinf.runners.task import Evaluated, Purpose, Task

if TYPE_CHECKING:
    from rlinf.checkpoint.contents import Checkpoint
    from rlinf.runners.groups import Groups
    from rlinf.workers.config.served_policy import Server

log = logging.getLogger(__name__)

_DECIDE = ("env", "evaluation", "model", "rollout")
"""Sections that decide how an episode ends, with the files that they name."""

SpecT = TypeVar("SpecT", bound=HashedSpec)
ResultT = TypeVar("ResultT", bound=SpecifiedResult)


class Evaluator(ABC, Generic[SpecT, ResultT]):
    """How the runs of a task are evaluated."""

    spec_class: ClassVar[type[HashedSpec]]
    """What a specification file is read as."""

    @abstractmethod
    def spec(self, purpose: Purpose, items: int | None = None) -> SpecT | None:
        """What a run is evaluated on, or so many items; None: nothing."""

    @abstractmethod
    def check(self, spec: SpecT) -> None:
        """Refuse, by a ConfigError, a specification that is not of this run's task."""

    @abstractmethod
    def play(
        self, groups: Groups, spec: SpecT, name: str, kept: PlayedEpisodes | None = None
    ) -> ResultT:
        """Do what a specification says with the weights that the workers hold, called ``name``;
        what is ``kept`` is done already, and what is done is added to it."""

    @abstractmethod
    def metrics(self, result: ResultT) -> dict[str, float]:
        """What is logged; ``eval/success`` among it."""

    def stem(self, purpose: Purpose) -> str:
        """With what the names of the files of a run begin."""
        return purpose

    def film(self, groups: Groups, spec: SpecT, path: Path, *, at_least: int = 0) -> Path | None:
        """Write a video of what the weights do, of the first items of a specification: so many, or
        more if the run's recipe says so; None: of none, or nothing renders."""
        raise ConfigError("--video: there is nothing to see; leave it out")

    films: ClassVar[bool] = False
    """Whether there is something to see."""
    manner = ""
    """How what is evaluated acts, where there are several ways; results of two do not compare."""
    keeps_what_is_played = False
    """Whether an evaluation that was interrupted goes on where it was."""
    suffix = ""
    """Of the files of results that are not of the usual way to evaluate."""

    def of_run(
        self, groups: Groups, purpose: Purpose, name: str, step: int, *, directory: Path
    ) -> Evaluated | None:
        """Evaluate the weights that the workers hold, and write specification and result down."""
        spec = self.spec(purpose)
        if spec is None:
            return None
        stem = self.stem(purpose)
        with _without_room():
            spec.save(directory / f"{stem}_spec.json")
        result = self.play(groups, spec, name)
        with _without_room():
            result.save(directory / f"{stem}_step_{step:08d}.json")
        metrics = self.metrics(result)
        return Evaluated(metrics, score=self.score(result, metrics), text=str(result))

    def score(self, result: ResultT, metrics: Mapping[str, float]) -> float:
        """By what the best weights are kept, higher is better; the success rate."""
        del result
        return metrics["eval/success"]


@contextmanager
def _without_room() -> Iterator[None]:
    """Go on where the disk is full: what an evaluation found is logged as well."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        log.warning("The disk is full: %s is not written. Free some space.", error.filename)


# -- runs that are there, and what a recipe begins with -----------------------------------------


@dataclass(frozen=True)
class Beginning:
    """The model that a recipe begins with, to be evaluated as it is.

    Args:
        config: Of the recipe.
        name: What the model is called.
        directory: Where results are written.
    """

    config: PlacedConfig
    name: str
    directory: Path


def beginning(config: PlacedConfig) -> Path | None:
    """Directory or file of the model that a recipe begins with; None: random weights."""
    model = getattr(config, "model", None)
    if getattr(model, "architecture", None) is not None:  # of which the directory gets one
        return None
    found = getattr(model, "starting_weights", None) or getattr(model, "path", None)
    return None if found is None else Path(found)


def require_beginning(config: PlacedConfig, recipe: str) -> Path:
    """The same; ConfigError where a recipe begins with random weights."""
    found = beginning(config)
    if found is None:
        made = getattr(getattr(config, "model", None), "architecture", None) is not None
        more = " model.architecture=null" if made else ""
        newest = Path(config.runner.output_dir).expanduser() / Path(recipe).stem / LATEST
        run = newest if newest.exists() else f"the run of `rlinf train {recipe}`"
        raise ConfigError(
            f"{recipe} begins with random weights; nearest: model.path=DIRECTORY{more}, for a "
            f"model that is there, or {run}"
        )
    return found


def evaluate(
    task: type[Task[Any]],
    source: Path | Beginning,
    *,
    overrides: Sequence[str] = (),
    items: int | None = None,
    spec: Path | None = None,
    video: bool = False,
    compare: tuple[type[Task[Any]], Path] | None = None,
    server: Server | None = None,
) -> SpecifiedResult:
    """Evaluate a run or a checkpoint, print the result and write it to the run's directory.

    Args:
        task: Of the run.
        source: A run directory, one of its checkpoints, or what a recipe begins with.
        overrides: ``key=value`` for the configuration of both runs; none decides what was trained.
        items: Held-out episodes or prompts; None: what the run's recipe says.
        spec: File with the exact list of them, instead.
        video: Whether to write a video.
        compare: Another run or checkpoint, with its task, to compare with on the same items.
        server: Who acts, in place of the policy in this process.

    Raises:
        ConfigError: The specification is for another task, or nothing is evaluated; or the server
            has another policy.
        ServerError: It cannot be reached.
        CheckpointError: There is no good checkpoint.
    """
    first, given = _evaluate_one(
        task, source, overrides, items=items, spec_file=spec, video=video, server=server,
        beside=compare,
    )  # fmt: skip
    if compare is not None:
        other, _ = _evaluate_one(*compare, overrides, spec=given)
        print(compare_results(other, first))
    return first


def _evaluate_one(
    task: type[Task[Any]],
    source: Path | Beginning,
    overrides: Sequence[str],
    *,
    items: int | None = None,
    spec_file: Path | None = None,
    spec: HashedSpec | None = None,
    video: bool = False,
    server: Server | None = None,
    beside: tuple[type[Task[Any]], Path] | None = None,
) -> tuple[SpecifiedResult, HashedSpec]:
    """The result, and by which specification, which is to be that of the run ``beside`` it too."""
    from rlinf.runners.groups import Groups

    run, config = _found(task, source, overrides)
    served = None if server is None else server.in_place(config)
    prepared = task(config if served is None else served.config, run)
    evaluator = prepared.evaluator
    if evaluator is None:
        instead = prepared.instead_of_evaluation
        raise ConfigError(f"runs of task '{config.task}' are not evaluated; {instead}")
    if video and not evaluator.films:
        raise ConfigError(f"--video: task '{config.task}' has nothing to show; leave it out")
    if spec_file is not None:
        spec = evaluator.spec_class.load(spec_file)
    spec = spec or evaluator.spec("held_out", items)
    if spec is None:
        raise ConfigError("the run has no validation prompts; name files in data.files.validation")
    evaluator.check(spec)
    if beside is not None:
        _require_comparable(run, evaluator, spec, beside, overrides)
    if isinstance(source, Beginning):
        checkpoint, name, step = None, source.name, 0
    else:
        checkpoint = good_checkpoint(task, source)
        name, step = f"{run.name} step {checkpoint.step}", checkpoint.step
    if served is not None:
        name, step = served.name, served.version
    stem = f"spec_{spec.sha256[:12]}_step_{step:08d}{evaluator.suffix}"
    stem += "" if served is None else f"_served_{served.stem}"
    file = run / "evaluations" / f"{stem}.json"
    kept = None
    if evaluator.keeps_what_is_played and served is None:
        kept = _kept(file, spec, config, checkpoint)
    with Groups(prepared, trains=task.evaluates is None, traces=run / "trace") as groups:
        if served is None and checkpoint is not None:
            with checkpoint.read_as_written():
                prepared.load_weights(groups, checkpoint)
        result = _played(evaluator, groups, spec, name, kept)
        print(f"{name}: {result}", flush=True)
        save_printed(result, file)
        if kept is not None:
            kept.remove()
        print(f"written to {file}", flush=True)
        film = run / "videos" / f"{stem}.mp4"
        written = evaluator.film(groups, spec, film, at_least=1) if video else None
        if written is not None:
            print(f"video: {written}", flush=True)
    return result, spec


def _require_comparable(
    run: Path,
    evaluator: Evaluator[Any, Any],
    spec: HashedSpec,
    beside: tuple[type[Task[Any]], Path],
    overrides: Sequence[str],
) -> None:
    """Refuse another run that is not evaluated on the same things, or in another manner."""
    its_task, its_run = beside[0], run_of(beside[1])
    other = its_task(_configured(its_task, its_run, overrides), its_run).evaluator
    if other is None or not isinstance(spec, other.spec_class):
        raise ConfigError("--compare: the two runs are evaluated on different things")
    other.check(spec)
    if other.manner != evaluator.manner:
        raise ConfigError(
            f"--compare: {run.name} is evaluated {evaluator.manner}, {its_run.name} "
            f"{other.manner}, and only results of one manner are compared; nearest: "
            "evaluation.deterministic=true, which holds for both"
        )


def _kept(
    file: Path, spec: HashedSpec, config: PlacedConfig, checkpoint: Checkpoint | None
) -> PlayedEpisodes:
    """Where an evaluation keeps what it has played; the user is told of what is there already."""
    found = to_data(config)
    decides: dict[str, Any] = {name: found.get(name) for name in _DECIDE}
    decides["files"] = {
        key: fingerprint(path)
        for key, path in named_files(config)
        if key.partition(".")[0] in _DECIDE and path.exists()
    }
    if checkpoint is not None:
        decides["weights"] = (checkpoint.path / MANIFEST).read_text(encoding="utf-8")
    text = json.dumps(decides, sort_keys=True)
    kept = PlayedEpisodes(
        file.with_suffix(""),
        {"spec": spec.sha256, "played": hashlib.sha256(text.encode()).hexdigest()},
    )
    with suppress(OSError):  # who writes says so
        file.parent.mkdir(parents=True, exist_ok=True)
    if known := len(kept.read()):
        names = " ".join(str(path) for path in kept.files())
        print(f"{known} episodes were played before: rm {names} to begin anew", flush=True)
    return kept


def _played(
    evaluator: Evaluator[Any, Any],
    groups: Groups,
    spec: HashedSpec,
    name: str,
    kept: PlayedEpisodes | None,
) -> SpecifiedResult:
    """The result; an interrupt, perhaps hours after the last word, says what is lost."""
    try:
        result: SpecifiedResult = evaluator.play(groups, spec, name, kept)
    except KeyboardInterrupt:
        told = "nothing is written of what was played; begin anew"
        if kept is not None:
            told = f"{len(kept.read())} episodes are kept; the same command goes on from there"
        print(f"interrupted: {name}: {told}", file=sys.stderr, flush=True)
        raise
    return result


def save_printed(result: SpecifiedResult, file: Path) -> None:
    """Write down a result that the user has read already; RunFailure where that is not possible."""
    try:
        result.save(file)
    except OSError as error:
        raise RunFailure(f"the result is not written to {file}: {error.strerror}") from error


def _found(
    task: type[Task[Any]], source: Path | Beginning, overrides: Sequence[str]
) -> tuple[Path, PlacedConfig]:
    """The directory that results are written to, and by which configuration."""
    if isinstance(source, Beginning):
        return source.directory, source.config
    run = run_of(source)
    return run, _configured(task, run, overrides)


def run_of(source: Path) -> Path:
    """The directory of a run, which is given, or of that of one of its checkpoints."""
    return source if (source / CONFIG_FILE).is_file() else source.parent.parent


def load_run(
    task: type[Task[Any]], source: Path, overrides: Sequence[str] = ()
) -> tuple[PlacedConfig, Checkpoint]:
    """Configuration of a run with its ``overrides`` (``key=value``), and the checkpoint that is
    named, or else its good one: the newest, or the best where the task leaves that behind.

    Raises:
        ConfigError: Its model is not the one that it began with, or a file of its tools is gone.
        CheckpointError: There is no good checkpoint.
    """
    return _configured(task, run_of(source), overrides), good_checkpoint(task, source)


def _configured(task: type[Task[Any]], run: Path, overrides: Sequence[str]) -> PlacedConfig:
    recipe = load_recipe(str(run / CONFIG_FILE), overrides)
    config = validate(task.config_class, recipe.data, recipe, evaluated=True)
    origin = origin_of(task, run)
    origin.refuse_other_config(
        config, task.changeable_evaluation, why="a trained run", evaluated=True
    )
    origin.refuse_other_files(config, section="model")
    # What its tools reply is part of what is evaluated, and may be mended.
    origin.refuse_other_files(config, section="rollout", changed_code=True)
    for section in ("env", "reward", "data.files.validation"):
        origin.tell_other_files(config, section=section)
    return config


def origin_of(task: type[Task[Any]], run: Path) -> Origin:
    """What a run began with; of one that did not write it down, its configuration alone."""
    origin = Origin.load(run)
    if origin is None:
        recipe = load_recipe(str(run / CONFIG_FILE), [])
        config = validate(task.config_class, recipe.data, recipe, evaluated=True)
        origin = Origin(to_data(config))
    return origin


def good_checkpoint(task: type[Task[Any]], source: Path) -> Checkpoint:
    """The checkpoint that is named, or else the good one of a run; see :func:`load_run`."""
    from rlinf.checkpoint.contents import load_checkpoint
    from rlinf.checkpoint.store import CheckpointStore

    if run_of(source) != source:
        return load_checkpoint(source)
    store = CheckpointStore(source / "checkpoints", read_only=True)
    if not store.steps():
        raise CheckpointError(f"the run {source} has no checkpoint yet")
    scored = any(manifest.metric is not None for manifest in store.manifests().values())
    return store.load("best" if task.leaves_best and scored else "latest")
