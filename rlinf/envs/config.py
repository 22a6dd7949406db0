"""The sections of a recipe that say which simulators run and how: ``env.train``."""

from __future__ import annotations

import bisect
import dataclasses
import importlib.util
import math
import re
import shutil
from collections.abc import Sequence
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Self

import pydantic
from pydantic import Discriminator, Field, Tag

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.effects import idle_keys
from rlinf.config.nearest import did_you_mean, join_choices
from rlinf.config.options import ComponentOptions, field_descriptions
from rlinf.config.reasons import reason, required
from rlinf.envs.base import REGISTRY, SimulatorBatch, require_methods
from rlinf.envs.installation import interpreter, reinstall_hint, variables
from rlinf.envs.renderers import RENDERERS, mujoco_renderer
from rlinf.errors import ConfigError
from rlinf.processes.child import ONE_THREAD, ProcessLostError, SupervisedProcess

_INTERPRETERS = "give the path of an interpreter, for example envs/simulator/bin/python"
_CHECK_SECONDS = 60.0
_NAMED = 10
"""Env types that a refusal names; more have an option which says nothing of what they can."""


class EnvConfig(StrictModel):
    """One kind of simulated env and how its episodes run."""

    type: str
    """Which adapter: ``metaworld``, ``gymnasium``, or one that another package registers."""

    options: Annotated[dict[str, Any], ComponentOptions(REGISTRY)] = Field(default_factory=dict)
    """Options of the adapter, for example ``{task: reach-v3}``."""

    ratio: float = Field(default=1.0, gt=0)
    """Share of this section in the environments and evaluation episodes, relative to the other
    sections of the list: 3 beside 1 is three quarters."""

    max_episode_steps: int = Field(gt=0)
    """Primitive steps after which an episode is truncated."""

    observation_steps: int = Field(default=1, ge=1, le=8)
    """Successive steps of which the observations are shown: from 2 on there is `KEY@1` beside each
    `KEY`, what it showed a step before, and so on; at the start of an episode the first one stands
    for those before it. For policies that read several, as diffusion policies do (n_obs_steps)."""

    auto_reset: bool = True
    """Whether an env starts its next episode by itself when one ends."""

    ignore_terminations: bool = False
    """Whether only the step limit ends an episode: success is noted and the episode goes on."""

    group_size: int = Field(default=1, gt=0)
    """Consecutive envs that share their reset states (GRPO compares inside such a group)."""

    use_fixed_reset_states: bool = False
    """Whether every reset of an env leads to the same state, in every epoch."""

    reward_scale: float = 1.0
    """Factor on every reward that training sees; episode returns are reported without it."""

    step_penalty: float = Field(default=0.0, ge=0)
    """Taken from the scaled reward of every executed action: 1 makes of 1 at success, where the
    episode ends, -1 for every action before it. Episode returns are reported without it."""

    processes: int | None = Field(default=None, gt=0)
    """Env processes per worker; by default one per core that the worker may use."""

    step_deadline: float = Field(default=60.0, gt=0, le=1e9)
    """Seconds that one primitive step or one reset may take before the env counts as hanging."""

    start_deadline: float = Field(default=300.0, gt=0, le=1e9)
    """Seconds that building the envs of one process may take."""

    max_fault_rate: float = Field(default=0.1, ge=0, le=1)
    """The run stops when more than this part of the last ``fault_window`` episodes was faulty."""

    fault_window: int = Field(default=100, gt=0)
    """Episodes over which the fault rate is taken."""

    leave_out_failing_tasks: bool = False
    """Whether the other tasks go on without one whose resets always fail: its episodes are given to
    the next task, and an evaluation names it as missing. False: such a task stops the run."""

    one_at_a_time: bool = False
    """Whether no two envs may be open at once, as of one robot, or of a port that one process
    opens: training closes its env before an evaluation, and goes on with another as after a
    resume."""

    pin_processes: bool = True
    """Tie each of several env processes to a core of its own. Woken together, two of them would
    often queue for one core while the other core idles. False for a simulator that itself computes
    in several threads."""

    python: str | None = None
    """Interpreter of the env processes; by default that of the virtual environment which
    ``rlinf env install`` made for this type, else this one."""

    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the env processes, on top of those that the adapter asks for."""

    memory_limit_mb: int | None = Field(default=None, gt=0)
    """Resident memory beyond which an env process is replaced, its envs going on where they were;
    for a simulator that leaks."""

    @pydantic.field_validator("variables")
    @classmethod
    def _can_be_set(cls, values: dict[str, str]) -> dict[str, str]:
        for name, value in values.items():
            if not name or "=" in name or "\0" in name + value:
                nearest = re.sub(r"[=\0].*", "", name) or "NAME"
                raise ValueError(f"no system can set {name!r}; nearest: {nearest}")
        return values

    @pydantic.model_validator(mode="after")
    def _options_are_legal(self) -> Self:
        try:
            adapter = REGISTRY.load(self.type)
        except ConfigError as error:
            raise illegal("type", str(error)) from error
        options = _validated_options(self.type, self.options)
        self._require_renderer(options)
        if not issubclass(adapter, SimulatorBatch):
            return self
        if adapter.begins_together(options) and not self.ignore_terminations:
            why = f"`{self.type}` begins all episodes of this task together, so none may end early"
            raise illegal("ignore_terminations", why, hint="write true")
        if self.observation_steps > 1:
            why = f"`{self.type}` steps a batch, of which the present observations alone are kept"
            raise illegal("observation_steps", why, hint="nearest: 1")
        if self.leave_out_failing_tasks:
            why = f"`{self.type}` resets a batch together, so no task can be told from the others"
            raise illegal("leave_out_failing_tasks", why, hint="write false")
        return self

    def _require_renderer(self, options: Any) -> None:
        """Refuse a ``MUJOCO_GL`` by which MuJoCo would not draw, where it draws."""
        adapter = REGISTRY.load(self.type)
        chosen, needs = self.variables.get("MUJOCO_GL", "disable"), adapter.requirements
        of_mujoco = needs is not None and "MUJOCO_GL" in needs.variables
        if chosen in RENDERERS or not (of_mujoco or adapter.draws_by_mujoco(options)):
            return
        hint = did_you_mean(chosen, RENDERERS)
        raise illegal("variables.MUJOCO_GL", "is no renderer of MuJoCo", hint=hint)

    @property
    def one_batch_per_process(self) -> bool:
        """Whether the simulator leaves no room for a second pipeline stage."""
        adapter = REGISTRY.load(self.type)
        return issubclass(adapter, SimulatorBatch) and adapter.one_batch_per_process

    @cached_property
    def adapter_options(self) -> Any:
        """The options as the adapter's dataclass, defaults filled in."""
        return _validated_options(self.type, self.options)

    def check(self) -> None:
        """Refuse, within a second and before anything starts, an env that cannot be built.

        Raises:
            ConfigError: An option or the interpreter is not usable, or the adapter is broken.
            MissingPackageError: The simulator is not installed.
        """
        adapter = REGISTRY.load(self.type)
        require_methods(self.type, adapter)
        python = self.interpreter
        if python is None:
            adapter.check(self.adapter_options, self.max_episode_steps)
            return
        key = "python" if self.python else "type"
        if shutil.which(python) is None:
            helps = self.remedy or _INTERPRETERS
            raise ConfigError(f"{python} is no executable file; {helps}", key=key)
        settings = {
            "type": self.type,
            "remedy": self.remedy,
            "options": dataclasses.asdict(self.adapter_options),
            "max_episode_steps": self.max_episode_steps,
        }
        process = SupervisedProcess(
            "rlinf.envs.supervised.option_check",
            settings,
            environment=self.environment,
            python=python,
        )
        try:
            process.receive(min(self.start_deadline, _CHECK_SECONDS))
        except ProcessLostError as lost:
            why = _why_lost(lost, python, self.remedy)
            reason = f"{python} cannot run env type `{self.type}`: {why}"
            raise ConfigError(reason, key=key) from lost
        finally:
            process.close()

    def own_modules(self) -> dict[str, Path]:
        """See :meth:`StrictModel.own_modules`: of adapter and task, unless a package has them."""
        adapter = REGISTRY.load(self.type)
        names = (adapter.__module__, *adapter.modules(self.adapter_options))
        found = {name: _own_file(name) for name in names if not name.startswith("rlinf.")}
        return {name: path for name, path in found.items() if path is not None}

    @property
    def interpreter(self) -> str | None:
        """Interpreter of the env processes, None for this one.

        Raises:
            ConfigError: The simulator has an environment of its own, which is not there or not of
                these pins.
        """
        return self.python or interpreter(self.type)

    @property
    def remedy(self) -> str:
        """What helps where the interpreter cannot import what it should have: to install anew what
        ``rlinf env install`` made; empty for any other interpreter."""
        return "" if self.python or interpreter(self.type) is None else reinstall_hint(self.type)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the env processes."""
        python, renderer = self.interpreter, {}
        if REGISTRY.load(self.type).draws_by_mujoco(self.adapter_options):
            renderer = {"MUJOCO_GL": mujoco_renderer(python)}
        return {**ONE_THREAD, **renderer, **variables(self.type, python), **self.variables}


def _own_file(module: str) -> Path | None:
    """The file of a module that is there, and no package installed it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = None if spec is None else spec.origin
    if origin is None or not origin.endswith(".py"):
        return None
    path = Path(origin)
    return None if {"site-packages", "dist-packages"} & set(path.parts) else path


def _why_lost(lost: ProcessLostError, python: str, remedy: str) -> str:
    """Why an interpreter could not judge options, in one line, and what would help: the remedy, if
    it is one that an install made."""
    first, *others = [line.strip() for line in lost.detail.splitlines() if line.strip()]
    last = others[-1] if others else first
    if missing := re.search(r"No module named '(numpy|gymnasium)", last):
        helps = remedy or f"`{python} -m pip install numpy gymnasium` installs it"
        return f"it lacks {missing[1]}; {helps}"
    if lost.reason == "crash":
        how = first.partition(";")[0]
        said = "" if last in (first, "(nothing)") else f" and said: {last}"
        return f"it is no Python, or a broken one: {how}{said}; {remedy or _INTERPRETERS}"
    return first if lost.reason == "hang" else last


EnvSections = Annotated[
    Annotated[EnvConfig, Tag("one")] | Annotated[tuple[EnvConfig, ...], Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list | tuple) else "one"),
]
"""One section, or a list of them, each with a simulator of its own."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """Which section each environment or evaluation episode is of, by its number in the run alone.

    The numbers repeat a pattern, whatever workers, stages and processes there are: ``sizes[0]``
    numbers of the first section, ``sizes[1]`` of the second, and so on.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sections: Sequence[EnvConfig], group_size: int = 1) -> Shares:
        """The shortest pattern with these ratios in which every section has whole groups."""
        ratios = [Fraction(str(section.ratio)) for section in sections]
        groups = [ratio / sum(ratios) / group_size for ratio in ratios]
        unit = math.lcm(*(share.denominator for share in groups))
        return cls(tuple(int(share * unit) * group_size for share in groups))

    @property
    def unit(self) -> int:
        """Length of the pattern, what numbers of environments must be a multiple of."""
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where in the pattern each section begins."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    def section(self, number: int) -> int:
        """The section of an environment or episode."""
        return bisect.bisect_right(self.starts, number % self.unit) - 1

    def count(self, section: int, total: int) -> int:
        """How many of the numbers below ``total`` are of a section."""
        whole, rest = divmod(total, self.unit)
        size, start = self.sizes[section], self.starts[section]
        return whole * size + min(max(rest - start, 0), size)

    def number(self, section: int, place: int) -> int:
        """The number in the run of a section's ``place``-th environment or episode."""
        whole, rest = divmod(place, self.sizes[section])
        return whole * self.unit + self.starts[section] + rest


class Environments(StrictModel):
    """The environments of the run."""

    train: EnvSections
    """The simulator and its task; or a list of such sections, whose environments are stepped and
    whose policy is trained together."""

    @property
    def sections(self) -> dict[str, EnvConfig]:
        """The sections by their keys in the recipe."""
        if isinstance(self.train, EnvConfig):
            return {"env.train": self.train}
        return {f"env.train.{place}": section for place, section in enumerate(self.train)}

    @property
    def shares(self) -> Shares:
        """Which environment is of which section."""
        sections = list(self.sections.values())
        return Shares.of(sections, sections[0].group_size)

    @pydantic.model_validator(mode="after")
    def _sections_go_together(self) -> Self:
        (first, section), *others = self.sections.items() or [("", None)]
        if section is None:
            raise illegal("train", "lists no section", hint="write at least one")
        if not others and section.ratio != 1:
            key = f"{first}.ratio".removeprefix("env.")
            raise illegal(key, "there is no other section to share with", hint="leave it out")
        for key, other in others:
            for name in ("group_size", "auto_reset"):
                wanted = getattr(section, name)
                if getattr(other, name) != wanted:
                    raise illegal(
                        f"{key}.{name}".removeprefix("env."),
                        f"must be that of {first}, since one rollout has groups and resets of one "
                        "kind",
                        hint=f"nearest: {str(wanted).lower()}",
                    )
        return self


class TrainingEnvironments(Environments):
    """Those that experience is collected in."""

    num_envs: int = Field(ge=1, le=1_000_000)
    """Training environments, over all env workers."""


def _validated_options(name: str, values: dict[str, Any]) -> Any:
    """Return the dataclass of an adapter; a list counts as a tuple, an integer as a float."""
    options_class = REGISTRY.load(name).Options
    known = _names(options_class)
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known)
            if others := _with_option(key):
                drop = "~env.train.options, or ~env.train.N.options of number N of a list"
                hint = f"to drop those of another simulator: {drop}; {hint}"
                if len(others) <= _NAMED:
                    hint = f"env types with it: {join_choices(others)}; {hint}"
            raise illegal(f"options.{key}", f"unknown option of {name}", hint=hint)
    try:
        options = _form_of(options_class).validate_json(  # type: ignore[arg-type]
            _form_of(dict[str, Any]).dump_json(values), strict=True
        )
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("options", *first["loc"]))
        if first["type"] == "missing":
            option = str(first["loc"][-1])
            why = required(field_descriptions(options_class).get(option))
            example = REGISTRY.load(name).example.get(option)
            hint = f"for example {example}" if example and "``" not in why else ""
        else:
            why, hint = reason(pydantic.BaseModel, where, first["input"], first, values), ""
        raise illegal(where, why, hint=hint) from error
    except (TypeError, ValueError) as error:
        raise illegal("options", str(error)) from error
    for problem in idle_keys(options, at="options."):
        raise problem
    return options


@cache
def _form_of(kind: Any) -> pydantic.TypeAdapter[Any]:
    """What reads and writes values of a type; to make one takes longer than to read by it."""
    return pydantic.TypeAdapter(kind)


def _names(options_class: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(options_class)]


def _with_option(key: str) -> list[str]:
    """Env types that have an option of this name."""
    return [
        name
        for name, adapter in REGISTRY.usable()
        if not isinstance(adapter, ConfigError) and key in _names(adapter.Options)
    ]
