"""What the recipe sections of all published policies have; imports no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open

from rlinf.checkpoint.weights_file import STATISTICS, read_header
from rlinf.config.component import illegal
from rlinf.data.json_files import read_settings
from rlinf.errors import ConfigError, in_section, sought
from rlinf.models.config import (
    PUBLISHED_WEIGHTS,
    ModelConfig,
    Width,
    require_type_of_directory,
)
from rlinf.models.vla.conventions import ActionConventions

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rlinf.envs.spec import EnvSpec
    from rlinf.models.policy import Policy
    from rlinf.models.vla.statistics import Kind, Method, ModelStatistics, Statistics

log = logging.getLogger(__name__)

MOST_ACTIONS = 10_000
"""Of those that are denoised together; published models have 8 to 100."""
_METHODS: Mapping[str, Method | None] = {
    "MEAN_STD": "mean_std",
    "MIN_MAX": "min_max",
    "QUANTILES": "quantiles",
    "IDENTITY": None,
}


def _require_published(path: Path) -> None:
    """Refuse a directory without weights, or whose one file of them is damaged; shards are looked
    at when they are read."""
    file = path.expanduser() / "model.safetensors"
    if file.is_file():
        try:
            with safe_open(file, "numpy"):
                return
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} holds no weights: {error}", key="path") from error
    if not file.with_name(f"{file.name}.index.json").is_file():
        held = f"neither {file.name} nor {file.name}.index.json"
        if pickled := sorted(each.name for each in file.parent.glob("*.bin")):
            held += f"; {pickled[0]} would run code as it is read: save it as safetensors"
        raise ConfigError(f"{path} holds no published weights: {held}", key="path")


def normalisation(settings: Mapping[str, Any], path: Path) -> dict[str, Method | None]:
    """How ``VISUAL``, ``STATE`` and ``ACTION`` are normalised, as far as a config.json of lerobot
    says so; None: not at all. ConfigError where it names a method that is not known here."""
    said = settings.get("normalization_mapping") or {}
    if not isinstance(said, Mapping):
        raise ConfigError(
            f"{path} has normalization_mapping: {said!r} in its config.json, expected a mapping",
            key="path",
        )
    for kind, method in said.items():
        if not isinstance(method, str) or method not in _METHODS:
            raise ConfigError(
                f"{path} has normalization_mapping.{kind}: {method} in its config.json, which is "
                f"not known here; nearest: {', '.join(_METHODS)}",
                key="path",
            )
    return {kind: _METHODS[method] for kind, method in said.items()}


WITH_STATISTICS = "statistics | path | weights"
"""For `only_with`: of what belongs to statistics, which a preset has none of by itself."""


class PublishedConfig(ModelConfig):
    """A policy whose architecture and first weights are those of a published model."""

    half_precision = True
    only_imitates = True
    of_values: ClassVar[tuple[str, ...]] = ("value_head", "detach_values")
    described: ClassVar[bool] = True
    """Whether a published directory needs a config.json: its weights and the section say too little
    of the model."""
    usually_normalised_by: ClassVar[Method]
    """Which statistics scale states and actions, where a directory does not say otherwise; not of
    sections with a key `normalization`, which says it."""
    only_with: ClassVar = {"statistics_key": "statistics | path"}

    path: Path | None = None
    """Directory of the model in its published format; null: `preset` says what is made."""
    preset: Literal["tiny"] | None = None
    """Make a model of random weights, which depend on the seed alone: `tiny` has the published
    architecture with at most 3 million parameters; null: `path` names one."""
    conventions: ActionConventions = ActionConventions()
    """What the actions of the model are for the environment."""
    weights: Path | None = None
    """Weights to go on with, a file `policy.safetensors` as runs leave it behind, which holds what
    was trained of this model; null: those of `path` or `preset`."""
    cameras: tuple[str | None, ...] = Field(default=("main_images",), min_length=1)
    """Image observations in the order of the model's views; null leaves a view out. An observation
    of several pictures fills as many views."""
    statistics: Path | None = None
    """File of the statistics by which states and actions are normalised; null: those that `weights`
    were trained with, those in `path`, or the bounds of the environment's actions."""
    statistics_key: str | None = None
    """Which of several sets of statistics holds; null: the only one."""
    value_head: tuple[Width, ...] = (512, 128)
    """Widths of the hidden layers of the value head, which begins afresh."""
    detach_values: bool = False
    """Train the value head alone by the error of the values, not what it reads from."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.path is None) == (self.preset is None):
            given = "neither is" if self.path is None else "both are"
            raise illegal(
                "path",
                f"{given} given of path and preset",
                hint="the directory of a published model, or preset: tiny",
            )
        return self

    def build(self, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0) -> Policy:
        """As of every model; ConfigError, too, where the files of `path` describe none."""
        if self.path is None:
            return super().build(env_spec, value_dim=value_dim, seed=seed)
        import torch

        try:
            return super().build(env_spec, value_dim=value_dim, seed=seed)
        except (
            torch.OutOfMemoryError,
            getattr(torch, "AcceleratorError", torch.OutOfMemoryError),  # since torch 2.8
        ):
            raise
        except (
            LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError
        ) as error:  # fmt: skip
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(
                f"{self.path} cannot be read as a model of the type {self.type} ({told}): one of "
                "its files, such as config.json, is damaged or of another version; copy the model "
                "again",
                key="model.path",
            ) from error

    @property
    def starting_weights(self) -> Path | None:
        """File of weights that a run left behind."""
        return self.weights

    def check_starting_weights(self, path: Path, *, value_dim: int, seed: int) -> None:
        """Of a preset alone: what fits a published model is known when that has been read."""
        if self.preset is not None:
            super().check_starting_weights(path, value_dim=value_dim, seed=seed)

    @property
    def normalised_by(self) -> Method:
        """As the section says, or what is usual."""
        method: Method = getattr(self, "normalization", None) or self.usually_normalised_by
        return method

    def settings(self, *, key: str = "path") -> dict[str, Any]:
        """What config.json of `path` says; nothing where there is none and none is needed.
        ConfigError of ``key`` where it cannot be read."""
        assert self.path is not None
        file = self.path.expanduser() / "config.json"
        return read_settings(file, key=key) if self.described or file.is_file() else {}

    @property
    def units(self) -> dict[Kind, Method | None]:
        """Which statistics scale states and actions; None: they are not scaled. What `path` says of
        it goes before what is usual, and the recipe, where it has a key for it, before that."""
        usual = self.normalised_by
        said: Mapping[str, Method | None] = {}
        file = None if self.path is None else self.path.expanduser() / "config.json"
        if file is not None and file.is_file() and not hasattr(self, "normalization"):
            said = normalisation(read_settings(file, key="path"), file.parent)
        return {"states": said.get("STATE", usual), "actions": said.get("ACTION", usual)}

    @property
    def published_statistics(self) -> Path | None:
        """Where statistics are that neither the section nor a run says."""
        return self.path

    @property
    def statistics_source(self) -> Path | None:
        """Where statistics are; None: the bounds of the environment's actions stand for them."""
        if self.statistics is not None:
            return self.statistics
        if self.weights is not None and STATISTICS in read_header(self.weights):
            return self.weights
        return self.published_statistics

    def read_statistics(self) -> ModelStatistics | None:
        """Those of :attr:`statistics_source`; ConfigError where it has none of the key."""
        from rlinf.models.vla import statistics_files

        source = self.statistics_source
        if source is None:
            return None
        if source == self.weights:  # a run keeps what it used, without keys and parts
            return statistics_files.read_statistics(source)
        return statistics_files.read_statistics(source, **self.statistics_choice)

    def own_statistics(self) -> ModelStatistics | None:
        """Those that hold, where they are not those of `path`, which `weights` may repeat."""
        found = self.read_statistics()
        if found is None or self.statistics_source == self.path:
            return None
        with suppress(ConfigError):  # there are none in `path`, or several
            base = self.model_copy(update={"statistics": None, "weights": None}).read_statistics()
            if base is not None and base.to_data() == found.to_data():
                return None
        return found

    @property
    def statistics_choice(self) -> dict[str, Any]:
        """Which of the statistics in a published directory or file hold: arguments of
        :func:`~rlinf.models.vla.statistics_files.read_statistics`."""
        return {"key": self.statistics_key}

    def header(self) -> dict[str, str]:
        """What a file of its weights says of it: the statistics, too."""
        found = self.read_statistics()
        said = {} if found is None else {STATISTICS: json.dumps(found.to_data())}
        return super().header() | said

    @property
    def told_states(self) -> bool:
        """Whether states are read, in the units of their statistics."""
        return True

    def prepared(self, found: ModelStatistics) -> ModelStatistics:
        """Statistics as the model uses them."""
        return found

    def check_recorded(self, actions: np.ndarray, states: np.ndarray | None, *, key: str) -> None:
        """Refuse actions, and states that are read, that the statistics of the model were not taken
        of."""
        try:
            with in_section("model"):
                found, units = self.read_statistics(), self.units
                if found is None:
                    return  # the units are those of the environment
                if units["actions"] is not None:
                    found.actions.require(units["actions"], of="actions")
        except ConfigError as error:
            # It is no fault of the section that names the actions, whose key would be put before.
            raise ConfigError(str(error)) from error
        if units["actions"] is not None:
            self._check_actions(found.actions, units["actions"], actions, states, key=key)
        held = self.prepared(found).states if self.told_states else None
        if held is not None and states is not None and units["states"] is not None:
            held.check_read(states, units["states"], key=key)

    def _check_actions(
        self,
        known: Statistics,
        method: Method,
        actions: np.ndarray,
        states: np.ndarray | None,
        *,
        key: str,
    ) -> None:
        places = self.conventions.dimensions or tuple(range(actions.shape[1]))
        if max(places) >= known.dim:
            return  # they are of another robot, which the policy refuses by its environment
        given = self.conventions.of_recorded(actions, known.dim, states)
        known.check_recorded(given, places, method, key=key)
        if self.conventions.delta_dimensions and states is not None:
            self._tell_of_absolute(known, method, given, actions)

    def _tell_of_absolute(
        self, known: Statistics, method: Method, deltas: Tensor, actions: np.ndarray
    ) -> None:
        """Warn where the statistics of deltas are those of the recorded actions themselves."""
        moved, used = self.conventions.delta_dimensions, self.conventions.dimensions
        places = moved if used is None else [used[each] for each in moved]
        absolute = self.conventions.model_copy(update={"delta_dimensions": ()})
        recorded = absolute.of_recorded(actions, known.dim, None)
        if known.may_be_of(recorded, places, method) and not known.may_be_of(
            deltas, places, method
        ):
            log.warning(
                "the statistics of the model, of %s, are those of the recorded actions themselves "
                "in model.conventions.delta_dimensions, where the model gives distances from the "
                "state, of another range. Nearest: model.statistics of "
                "rlinf data stats SET --deltas %s --horizon H --out FILE, for the H actions that "
                "the model gives at once",
                self.statistics_source, ",".join(map(str, moved)),
            )  # fmt: skip

    def check(self) -> None:
        """Look for what is named, before anything is read."""
        if self.path is not None and self._lacks_description(self.path.expanduser()):
            directory = self.path.expanduser()
            found = "is a file" if directory.is_file() else "has no config.json"
            found = f"{self.path} {found}"
            if not directory.exists():
                found = f"there is no directory {sought(self.path)}"
            elif (directory / "adapter_config.json").is_file():
                found += ": it is a LoRA adapter, which is to be merged into its model first"
            raise ConfigError(
                f"{found}; nearest: the directory of a published model, or `weights` "
                "for the policy.safetensors of a run",
                key="path",
            )
        if self.path is not None:
            if (self.path.expanduser() / "config.json").is_file():
                require_type_of_directory(self.path, self)
            _require_published(self.path)
        if self.weights is not None:
            self.require_own_weights(self.weights, key="weights")
        if self.statistics is not None and not self.statistics.expanduser().is_file():
            raise ConfigError(f"there is no file {sought(self.statistics)}", key="statistics")
        self._check_statistics()
        self._tell_of_other_statistics()

    def _lacks_description(self, directory: Path) -> bool:
        """Whether the directory has no config.json and needs one, or has no weights either."""
        held = ("config.json",) if self.described else ("config.json", *PUBLISHED_WEIGHTS)
        return not any((directory / name).is_file() for name in held)

    def _check_statistics(self) -> None:
        """Refuse `statistics`, or those in `path`, without what actions are normalised by, or
        without the key, before anything is started; but for tensors, which torch reads."""
        source = self.statistics_source
        if source is None or source == self.weights or source.suffix == ".safetensors":
            return
        from rlinf.models.vla.statistics_files import require_actions

        require_actions(source, self.units["actions"], **self.statistics_choice)

    def _tell_of_other_statistics(self) -> None:
        """Warn where `statistics` are not those that `weights` were trained with."""
        if self.statistics is None or self.weights is None:
            return
        written = read_header(self.weights).get(STATISTICS)
        now = self.read_statistics()
        if written is None or now is None or json.loads(written) == now.to_data():
            return
        log.warning(
            "model.weights, %s, was trained with other statistics than those of model.statistics, "
            "%s: what it reads and gives means something else now. To go on with its own, leave "
            "model.statistics out.",
            self.weights, self.statistics,
        )  # fmt: skip


class VLAConfig(PublishedConfig):
    """One that reads an instruction."""

    tokenizer: Path | None = None
    """Directory or file of the tokenizer; null: the one in `path`, or of words for a preset."""

    def check(self) -> None:
        """Look for what is named, before anything is read."""
        super().check()
        if self.tokenizer is not None and not self.tokenizer.expanduser().exists():
            raise ConfigError(f"there is no tokenizer {self.tokenizer}", key="tokenizer")


class TokenConfig(VLAConfig):
    """What models have whose actions are tokens."""

    only_with: ClassVar = {"normalization": WITH_STATISTICS}

    temperature: float = Field(default=1.0, gt=0)
    """Logits of the tokens are divided by it, in rollout and training alike; in evaluation the most
    probable tokens are taken, where it is deterministic."""
    top_k: int = Field(default=0, ge=0, le=256)
    """Only so many of the most probable tokens of a dimension are drawn; 0: all 256."""
    max_prompt_tokens: int = Field(default=64, ge=1)
    """Longest instruction, in tokens; a longer one is refused and never cut."""
    normalization: Literal["quantiles", "bounds"] = "quantiles"
    """What -1 and 1 stand for: the quantiles 0.01 and 0.99, or the extremes as in ALOHA."""
    freeze_vision: bool = False
    """Leave the part that reads pictures as it is."""

    @property
    def told_states(self) -> bool:
        """None are read."""
        return False


class FlowConfig(VLAConfig):
    """What models have that denoise actions in some steps, of which some are random."""

    denoises = True
    steered_with = "ode"
    usually_normalised_by: ClassVar[Method] = "mean_std"
    former_horizon: ClassVar[int | None] = None
    """Actions that former versions denoised together where neither the section nor config.json says
    how many, and it has to be given by now; None: it has not."""
    of_values = (*VLAConfig.of_values, "value_from")
    of_exploration = ("noise_level", "noise_bounds", "random_steps")
    only_with: ClassVar = {
        "noise_level": "method: flow_sde | flow_cps",
        "noise_bounds": "method: flow_noise",
        "random_steps": "method: flow_sde | flow_cps | flow_noise",
    }

    cameras: tuple[str | None, ...] = Field(default=("main_images",), min_length=1, max_length=3)
    """Image observations in the order in which the model was trained on views: base, left wrist,
    right wrist. null leaves a view out, as do those that are not named: it is not attended to."""
    horizon: int | None = Field(default=None, ge=1, le=MOST_ACTIONS)
    """H, actions that are denoised together, of which `num_action_chunks` are executed; null: of a
    preset `num_action_chunks`, otherwise what config.json of `path` says. Where that is silent,
    GR00T has 16 and WALL-OSS 32, and of the others it is to be given."""
    denoising_steps: int = Field(default=10, ge=1)
    """K. Training runs as many passes of the expert if all steps are random, one otherwise."""
    method: Literal["ode", "flow_sde", "flow_noise", "flow_cps"] = "flow_sde"
    """How exploration enters: steps of a stochastic differential equation with the same marginals,
    with a learned deviation, with noise that keeps its share, or (`ode`) not at all."""
    noise_level: float = Field(default=0.5, gt=0, lt=1)
    """Of `flow_sde` and `flow_cps`: how random their steps are."""
    noise_bounds: tuple[float, float] = (0.08, 0.16)
    """Of `flow_noise`: the learned deviation lies between."""
    random_steps: Literal["one", "all"] | None = None
    """Which denoising steps of a chunk are random, and counted in its log-prob: one, drawn for each
    row anew, or all; null: all with `flow_noise`, otherwise one."""
    train_expert_only: bool = False
    """Leave vision and language model as they are."""
    value_from: Literal["expert", "mean", "first", "last"] | None = None
    """What values are read from: what the expert makes of zero actions at the noise end, or the
    language model's last hidden states of pictures and prompt, their mean, the first or the last
    one; null: `mean` of π₀.₅, of GR00T the mean and the token of the state, otherwise `expert`."""
    max_prompt_tokens: int = Field(default=48, ge=1)
    """Tokens that an instruction may have."""

    @property
    def without_log_probs(self) -> tuple[str, str] | None:
        """The ODE has no random steps."""
        return ("method", "flow_sde") if self.method == "ode" else None

    @property
    def without_entropy(self) -> tuple[str, str, str] | None:
        """Only the deviation of Flow-Noise is learned."""
        if self.method not in ("flow_sde", "flow_cps"):
            return None
        return "method", "whose deviation depends on the time of a step alone", "flow_noise"

    @property
    def all_random(self) -> bool:
        """Whether every denoising step is random."""
        chosen = self.random_steps or ("all" if self.method == "flow_noise" else "one")
        return chosen == "all"

    def may_be_told(self, key: str, was: Any, value: Any) -> bool:
        """The horizon that was taken where config.json is silent."""
        if key != "horizon" or was is not None or self.path is None:
            return super().may_be_told(key, was, value)
        settings = self.settings()
        silent = all(settings.get(name) is None for name in ("chunk_size", "action_horizon"))
        return silent and value == self.former_horizon

    def weight_settings(self) -> dict[str, Any]:
        """With how many actions a preset denoises together, which no shape tells."""
        found = super().weight_settings()
        horizon = self.horizon or self.num_action_chunks
        return found | ({"horizon": horizon} if self.path is None else {})

    @model_validator(mode="after")
    def _check_denoising(self) -> Self:
        low, high = self.noise_bounds
        if not 0 < low < high:
            raise illegal("noise_bounds", f"are [{low}, {high}]", hint="0 < the first < the second")
        if self.method == "flow_cps" and self.denoising_steps < 2:
            raise illegal(
                "denoising_steps", "the last step of flow_cps is not random", hint="nearest: 2"
            )
        if self.horizon is not None and self.horizon < self.num_action_chunks:
            raise illegal(
                "horizon",
                f"{self.horizon} actions are fewer than num_action_chunks",
                hint=f"nearest: {self.num_action_chunks}",
            )
        return self
