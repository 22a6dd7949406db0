"""The section of a recipe that says which simulator runs and how: ``env.train``."""

from __future__ import annotations

import dataclasses
import shutil
from functools import cached_property
from typing import Annotated, Any, Self

import pydantic
from pydantic import Field

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import did_you_mean
from rlinf.config.options import ComponentOptions
from rlinf.envs.base import REGISTRY
from rlinf.envs.installation import interpreter, variables
from rlinf.errors import ConfigError
from rlinf.processes.supervised import ONE_THREAD, ProcessLostError, SupervisedProcess


class EnvConfig(StrictModel):
    """One kind of simulated env and how its episodes run."""

    type: str
    """Which adapter: ``metaworld``, ``gymnasium``, or one that another package registers."""

    options: Annotated[dict[str, Any], ComponentOptions(REGISTRY)] = Field(default_factory=dict)
    """Options of the adapter, for example ``{task: reach-v3}``."""

    max_episode_steps: int = Field(gt=0)
    """Primitive steps after which an episode is truncated."""

    auto_reset: bool = True
    """Whether an env starts its next episode by itself when one ends."""

    ignore_terminations: bool = False
    """Whether only the step limit ends an episode: success is noted and the episode goes on."""

    group_size: int = Field(default=1, gt=0)
    """Consecutive envs that share their reset states (GRPO compares inside such a group)."""

    use_fixed_reset_states: bool = False
    """Whether every reset of an env leads to the same state, in every epoch."""

    reward_scale: float = Field(default=1.0, allow_inf_nan=False)
    """Factor on every reward that training sees; episode returns are reported without it."""

    processes: int | None = Field(default=None, gt=0)
    """Env processes per worker; by default one per core that the worker may use."""

    step_deadline: float = Field(default=60.0, gt=0)
    """Seconds that one primitive step or one reset may take before the env counts as hanging."""

    start_deadline: float = Field(default=300.0, gt=0)
    """Seconds that building the envs of one process may take."""

    max_fault_rate: float = Field(default=0.1, ge=0, le=1)
    """The run stops when more than this part of the last ``fault_window`` episodes was faulty."""

    fault_window: int = Field(default=100, gt=0)
    """Episodes over which the fault rate is taken."""

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

    @pydantic.model_validator(mode="after")
    def _options_are_legal(self) -> Self:
        try:
            adapter = REGISTRY.load(self.type)
        except ConfigError as error:
            raise illegal("type", str(error)) from error
        _validated_options(adapter.Options, self.options)
        return self

    @cached_property
    def adapter_options(self) -> Any:
        """The options as the adapter's dataclass, defaults filled in."""
        return _validated_options(REGISTRY.load(self.type).Options, self.options)

    def check(self) -> None:
        """Refuse, within a second and before anything starts, an env that cannot be built.

        Raises:
            ConfigError: An option or the interpreter is not usable.
            MissingPackageError: The simulator is not installed.
        """
        python = self.interpreter
        if python is None:
            REGISTRY.load(self.type).check(self.adapter_options, self.max_episode_steps)
            return
        if shutil.which(python) is None:
            raise ConfigError(
                f"{python} is no executable file; give the path of the interpreter, for "
                "example envs/simulator/bin/python",
                key="python",
            )
        settings = {
            "type": self.type,
            "options": dataclasses.asdict(self.adapter_options),
            "max_episode_steps": self.max_episode_steps,
        }
        process = SupervisedProcess(
            "rlinf.envs.option_check", settings, environment=self.environment, python=python
        )
        try:
            process.receive(self.start_deadline)
        except ProcessLostError as lost:
            last = lost.detail.strip().splitlines()[-1]
            raise ConfigError(f"{python} cannot run env type `{self.type}`: {last}") from lost
        finally:
            process.close()

    @property
    def interpreter(self) -> str | None:
        """Interpreter of the env processes, None for this one.

        Raises:
            ConfigError: The simulator has an environment of its own, which is not there or not of
                these pins.
        """
        return self.python or interpreter(self.type)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the env processes."""
        return {**ONE_THREAD, **variables(self.type, self.interpreter), **self.variables}


def _validated_options(options_class: type[Any], values: dict[str, Any]) -> Any:
    """Return the dataclass of an adapter; a list counts as a tuple, an integer as a float."""
    known = [field.name for field in dataclasses.fields(options_class)]
    for key in values:
        if key not in known:
            raise illegal(f"options.{key}", "unknown option", hint=did_you_mean(key, known))
    try:
        return pydantic.TypeAdapter(options_class).validate_json(
            pydantic.TypeAdapter(dict[str, Any]).dump_json(values), strict=True
        )
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("options", *first["loc"]))
        raise illegal(where, first["msg"]) from error
    except (TypeError, ValueError) as error:
        raise illegal("options", str(error)) from error
