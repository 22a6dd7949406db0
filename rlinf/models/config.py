"""Configuration of the policies; imports no torch, so that a recipe is checked in an instant."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlinf.checkpoint.weights_file import (
    MODEL,
    SETTINGS,
    STATE_SCALING,
    STATISTICS,
    read_header,
    refuse_unscaled,
    require_weights,
)
from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.dump import to_data
from rlinf.config.nearest import did_you_mean
from rlinf.config.reasons import show
from rlinf.config.registry import Registry, load_attribute, load_component
from rlinf.data.json_files import read_settings
from rlinf.envs.observation_names import depth_of, is_depth
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch.nn import Module

    from rlinf.envs.spec import EnvSpec
    from rlinf.models.policy import Policy

ActivationName = Literal["tanh", "relu", "elu", "silu", "gelu"]
Width = Annotated[int, Field(ge=1, le=65_536)]
_IMAGE_KEYS = ("main_images", "wrist_images", "extra_view_images")


def _image_key(name: str) -> str:
    """A name that pictures of environments may have; ValueError for another."""
    if name not in _IMAGE_KEYS and not re.fullmatch(r"images\.\w+", name):
        near = did_you_mean(name, (*_IMAGE_KEYS, "images.NAME"))
        raise ValueError(f"'{name}' is no name of pictures; {near}")
    return name


ImageKey = Annotated[str, AfterValidator(_image_key)]

LOG_STD_RANGE = (-5.0, 2.0)
"""Bounds of the logarithm of the standard deviation."""


def _made(policy: Any, config: Any, env_spec: Any, *, value_dim: int, seed: int) -> None:
    """How a policy is made."""


class ModelConfig(StrictModel):
    """Base of every policy's config section."""

    implementation: ClassVar[str]
    """``module:Class`` of the policy, imported when it is built."""

    published_as: ClassVar[tuple[str, ...]] = ()
    """What ``config.json`` of a published directory calls the model."""
    also_called: ClassVar[tuple[str, ...]] = ()
    """Names of other models by which directories of this one may go as well."""
    half_precision: ClassVar[bool] = False
    """Whether it can act and train in bfloat16."""
    repeats_layers: ClassVar[bool] = True
    """Whether it is trained through layers that follow each other, of which each may keep its
    inputs alone for the backward pass."""
    reads_earlier: ClassVar[bool] = False
    """Whether it reads observations of several successive steps."""
    denoises: ClassVar[bool] = False
    """Whether actions are denoised along a velocity
    (:class:`~rlinf.models.denoising.Denoising`)."""
    steered_with: ClassVar[str | None] = None
    """The value of ``method`` with which actions follow from the noise that denoising starts at
    alone, so that it can be chosen; None: actions are not denoised."""
    steers: ClassVar[bool] = False
    """Whether its actions are the noise from which another policy denoises."""
    only_imitates: ClassVar[bool] = False
    """Whether its own loss is the only one by which it learns recorded actions, as these have no
    log-prob and it has no mode in closed form."""
    with_pictures: ClassVar[str | None] = None
    """Of a policy that reads states alone: the type that reads pictures as well, empty where there
    is none. None: it is no such policy."""
    reads_depth_by: ClassVar[str | None] = None
    """The key by which depth is read; None: there is none."""
    of_values: ClassVar[tuple[str, ...]] = ()
    """Keys that mean something with a critic alone."""
    of_weights: ClassVar[tuple[str, ...]] = ()
    """Keys of this class, beside those of its bases, that change what weights compute and no shape:
    a file of weights says them, and a model with other ones refuses it."""
    of_exploration: ClassVar[tuple[str, ...]] = ()
    """Keys that mean something where actions are sampled to explore alone."""
    q_implementation: ClassVar[str | None] = None
    """``module:Class`` of the Q functions that go with the policy; None: it has none."""

    type: str
    """Which policy this section configures."""
    num_action_chunks: int = Field(default=1, ge=1)
    """C, primitive actions per decision."""
    path: Path | None = None
    """Weights to begin with, a file `policy.safetensors` as runs leave it behind; null: fresh ones.
    It must hold every tensor of the policy, of its shape; those of the critic may be missing."""
    any_action_limits: bool = False
    """Begin with weights that were trained in other limits of actions than those of the
    environment: its actions are in the same units all the same."""

    def build(self, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0) -> Policy:
        """The policy for an environment, with fresh weights that depend on ``seed`` alone.

        It gives V = ``value_dim`` values per chunk: 1, C, or 0 for one without a critic.
        ConfigError where it cannot deal with these observations or actions, or with the weights to
        begin with.
        """
        from rlinf.models.policy import Policy

        made = load_component(self.implementation, Policy, _made)
        policy: Policy = made(self, env_spec, value_dim=value_dim, seed=seed)
        if self.starting_weights is not None:
            from rlinf.models.policy_weights import load_initial_weights, refuse_other_environment

            refuse_other_environment(
                policy, env_spec, self.starting_weights, any_limits=self.any_action_limits
            )
            load_initial_weights(policy, self.starting_weights)
        return policy

    def unread(self, seen: Sequence[str]) -> tuple[str, ...]:
        """Those of an environment's pictures and their depths, by name, that the policy surely does
        not read; depth is read by no policy that does not say so here."""
        return tuple(seen if self.with_pictures is not None else filter(is_depth, seen))

    @property
    def without_log_probs(self) -> tuple[str, str] | None:
        """Which key has a value with which actions have no log-probs, and the nearest value with
        which they have; None: they have."""
        return None

    @property
    def without_entropy(self) -> tuple[str, str, str] | None:
        """Which key has a value with which a bonus for the entropy would not raise it, why, and the
        nearest value with which it would, empty where there is none; None: it would."""
        return None

    @property
    def starting_weights(self) -> Path | None:
        """File of weights that a run left behind."""
        return self.path

    def header(self) -> dict[str, str]:
        """What a file of its weights says of it beside the tensors, by name."""
        settings, scaling = self.weight_settings(), self.state_scaling
        said = {SETTINGS: json.dumps(settings)} if settings else {}
        return {MODEL: self.type} | said | ({STATE_SCALING: scaling} if scaling else {})

    @property
    def state_scaling(self) -> str | None:
        """How states are scaled by their statistics, where weights are to say so: an earlier
        version left them as they are; None: weights need not say it."""
        return None

    def weight_settings(self) -> dict[str, Any]:
        """The keys :attr:`of_weights` with their values, as JSON has them."""
        data = to_data(self)
        names = [name for each in type(self).__mro__ for name in vars(each).get("of_weights", ())]
        return {name: data[name] for name in names}

    def require_own_weights(self, path: Path, *, key: str) -> None:
        """Refuse, by a ConfigError of ``key``, a file that holds no weights, or says that they are
        of a model of another type or with other :attr:`of_weights`, or does not say their
        :attr:`state_scaling`; no tensor is read."""
        require_weights(path, key=key, model=self.type)
        said = read_header(path)
        refuse_unscaled(self.state_scaling, said, source=str(path), key=key)
        theirs = json.loads(said.get(SETTINGS, "{}"))
        own = self.weight_settings()
        others = {n: theirs[n] for n in own if n in theirs and theirs[n] != own[n]}
        if others:
            there = {name: show(value).strip("'") for name, value in others.items()}
            trained = ", ".join(f"model.{name}: {value}" for name, value in there.items())
            here = ", ".join(show(own[name]).strip("'") for name in others)
            raise ConfigError(
                f"{path} was trained with {trained}, here {here}, with which its weights compute "
                f"something else; nearest: {trained}",
                key=key,
            )

    def check_teacher(self, weights: Path, *, key: str) -> None:
        """Refuse, by a ConfigError of ``key``, weights of another type of model, or of one that
        reads states and gives actions in other units: its judgement of actions would be of others.
        """
        self.require_own_weights(weights, key=key)
        theirs, ours = read_header(weights), self.header()
        if MODEL not in theirs:  # it says nothing of itself
            return
        found, own = (json.loads(each.get(STATISTICS, "null")) for each in (theirs, ours))
        if found != own:
            nearest = f"model.statistics: {weights}"
            if found is None:
                nearest = "a teacher that was trained with those of the model"
            raise ConfigError(
                f"{weights} was trained with other statistics than the model has, so that its "
                f"numbers mean something else; nearest: {nearest}",
                key=key,
            )

    def check_recorded(self, actions: np.ndarray, states: np.ndarray | None, *, key: str) -> None:
        """Refuse, by a ConfigError of ``key``, recorded actions [N, A] with the states [N, D] they
        began in that are foreign to the model; called before a weight is read."""

    def check(self) -> None:
        """Look for the weights to begin with."""
        super().check()
        if self.path is not None:
            self.require_own_weights(self.path, key="path")

    def check_starting_weights(self, path: Path, *, value_dim: int, seed: int) -> None:
        """Refuse weights to begin with of another model, as far as that can be told without an
        environment; ConfigError as :meth:`build` raises it."""
        from rlinf.models.policy_weights import require_same_model

        require_same_model(self, path, value_dim=value_dim, seed=seed)

    def build_q_functions(self, env_spec: EnvSpec, *, seed: int = 0) -> Module:
        """Q functions of observations and action chunks, with fresh weights."""
        if self.q_implementation is None:
            raise ValueError(f"the model {self.type} has no Q functions")
        functions: Module = load_attribute(self.q_implementation)(self, env_spec, seed=seed)
        return functions


class TrunkPolicyConfig(ModelConfig):
    """What policies with a trunk for the actor and one for the critic have."""

    repeats_layers = False
    of_weights = ("activation",)

    hidden_sizes: tuple[Width, ...] = Field(default=(64, 64), min_length=1)
    """Widths of the hidden layers of the actor trunk and of the critic trunk."""
    activation: ActivationName = "tanh"
    """Non-linearity of the trunks."""
    hidden_gain: float = Field(default=math.sqrt(2.0), gt=0)
    """Gain of the orthogonal initialisation of hidden layers."""
    policy_gain: float = Field(default=0.01, gt=0)
    """Gain of the last layer of the actor; small values start near zero actions, or near equal
    probabilities."""


class GaussianPolicyConfig(TrunkPolicyConfig):
    """What every Gaussian policy has."""

    initial_log_std: float = Field(default=0.0, ge=LOG_STD_RANGE[0], le=LOG_STD_RANGE[1])
    """Logarithm of the standard deviation of the untrained policy."""
    state_dependent_std: bool = False
    """Let the network give the standard deviation; otherwise it is one free parameter per action
    dimension."""
    task_dependent_std: bool = False
    """Of an environment with several tasks, let each have a standard deviation of its own, so that
    one that has to be exact does not end the exploration of the others."""

    @model_validator(mode="after")
    def _check_deviation(self) -> Self:
        if self.state_dependent_std and self.task_dependent_std:
            raise illegal(
                "task_dependent_std",
                "with state_dependent_std the network gives the standard deviation",
                hint="set one of the two",
            )
        return self


class NormalizingConfig(ModelConfig):
    """A policy that scales the states it is trained on by what it has seen of them."""

    only_with: ClassVar = {"observation_clip": "normalize_observations: true"}
    of_weights = ("observation_clip",)

    normalize_observations: bool = True
    """Normalise states by their running mean and variance."""
    observation_clip: float = Field(default=10.0, gt=0)
    """Bound of normalised states, in standard deviations."""


class NormalizingPolicyConfig(GaussianPolicyConfig, NormalizingConfig):
    """A Gaussian policy that does so."""


class MLPConfig(NormalizingPolicyConfig):
    """Gaussian policy on ``states``: two perceptrons, one for actions and one for values."""

    implementation = "rlinf.models.gaussian:MLPPolicy"
    with_pictures = "cnn"
    type: Literal["mlp"] = "mlp"
    """Which policy this section configures."""


class CategoricalMLPConfig(TrunkPolicyConfig, NormalizingConfig):
    """Categorical policy on ``states`` for environments of discrete actions: two perceptrons, one
    for actions and one for values."""

    implementation = "rlinf.models.categorical:CategoricalMLPPolicy"
    with_pictures = "categorical_cnn"
    type: Literal["categorical_mlp"] = "categorical_mlp"
    """Which policy this section configures."""


class SquashedConfig(GaussianPolicyConfig):
    """A Gaussian whose samples are squashed into a box by tanh, and Q functions that go with it."""

    activation: ActivationName = "relu"
    """Non-linearity of policy and Q functions."""
    state_dependent_std: Literal[True] = True
    """The network gives the standard deviation."""
    q_hidden_sizes: tuple[Width, ...] = Field(default=(256, 256), min_length=1)
    """Widths of the hidden layers of each Q function."""
    q_functions: int = Field(default=2, ge=1)
    """How many Q functions there are; the algorithm says what of their values counts."""

    @property
    def without_entropy(self) -> tuple[str, str, str] | None:
        """−log p of a stored action has a gradient of 0 in the mean, and none that spreads."""
        nearest = "" if self.steers else "mlp"
        return "type", "whose entropy has no closed form", nearest


class SquashedMLPConfig(SquashedConfig, NormalizingPolicyConfig):
    """Gaussian policy on ``states`` whose actions are squashed into their box by tanh, and Q
    functions: perceptrons all."""

    implementation = "rlinf.models.soft_actor_critic:SquashedMLPPolicy"
    with_pictures = ""
    q_implementation = "rlinf.models.soft_actor_critic:QFunctions"
    type: Literal["squashed_mlp"] = "squashed_mlp"
    """Which policy this section configures."""
    hidden_sizes: tuple[Width, ...] = Field(default=(256, 256), min_length=1)
    """Widths of the hidden layers of the policy."""


class PictureEncoderConfig(TrunkPolicyConfig):
    """A policy with a small encoder per camera key (Mnih et al. 2015)."""

    of_weights = ("strides",)

    image_keys: tuple[ImageKey, ...] = Field(default=("main_images",), min_length=1)
    """Image observations to read: main_images, wrist_images, extra_view_images or images.NAME."""
    use_states: bool = True
    """Read `states` as well, where the environment gives them."""
    channels: tuple[Width, ...] = Field(default=(32, 64, 64), min_length=1)
    """Output channels of the convolutions."""
    kernel_sizes: tuple[int, ...] = (8, 4, 3)
    """Kernel widths in pixels, one per convolution."""
    strides: tuple[int, ...] = (4, 2, 1)
    """Strides in pixels, one per convolution."""
    image_features: int = Field(default=256, ge=1)
    """Width of the encoding of each image key."""

    @model_validator(mode="after")
    def _check_convolutions(self) -> Self:
        for key in ("kernel_sizes", "strides"):
            given = getattr(self, key)
            if len(given) != len(self.channels):
                raise illegal(
                    key,
                    f"{len(given)} numbers for {len(self.channels)} convolutions",
                    hint=f"channels has {len(self.channels)} entries, write as many",
                )
            if min(given) < 1:
                raise illegal(key, f"{min(given)} is not a number of pixels", hint="nearest: 1")
        return self


class PicturePolicyConfig(PictureEncoderConfig, NormalizingConfig):
    """A policy on pictures with the trunks of the perceptron policies behind its encoders."""

    of_values = ("shared_encoder", "critic_reads")
    of_weights = ("depth_range",)
    reads_depth_by = "depth_range"

    depth_range: float | None = Field(default=None, gt=0)
    """Read the depth of each picture of `image_keys` as well, as a channel behind its colours that
    is 1 from so many metres on; null: it is not read. The environment must show it, mostly by
    `env.train.options.depth: true`."""
    shared_encoder: bool = True
    """Let actor and critic share the encoders; otherwise each has its own."""
    critic_reads: Literal["pictures", "states"] = "pictures"
    """What the critic sees: what the actor does; or `states` alone, which may say where objects are
    although `use_states: false` keeps that from the actor, and cost no convolutions (Pinto et al.
    2017, "Asymmetric actor critic for image-based robot learning")."""

    @property
    def depth_keys(self) -> dict[str, str]:
        """By the key of a picture that of its depth, of those whose depth is read."""
        if self.depth_range is None:
            return {}
        return {key: depth_of(key) for key in self.image_keys}

    def unread(self, seen: Sequence[str]) -> tuple[str, ...]:
        """Those that `image_keys` does not name, and depths unless there is a `depth_range`."""
        read = {*self.image_keys, *self.depth_keys.values()}
        return tuple(name for name in seen if name not in read)

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        if self.critic_reads == "states" and not self.shared_encoder:
            raise illegal(
                "shared_encoder", "a critic that reads states has no encoder", hint="leave it out"
            )
        return self


class CNNConfig(PicturePolicyConfig, GaussianPolicyConfig):
    """Gaussian policy on images: convolutions per camera key, and the trunks of the perceptron
    policy behind them."""

    implementation = "rlinf.models.cnn:CNNPolicy"
    type: Literal["cnn"] = "cnn"
    """Which policy this section configures."""


class CategoricalCNNConfig(PicturePolicyConfig):
    """Categorical policy on images for environments of discrete actions, otherwise as `cnn`."""

    implementation = "rlinf.models.cnn:CategoricalCNNPolicy"
    type: Literal["categorical_cnn"] = "categorical_cnn"
    """Which policy this section configures."""


MODELS = {
    "mlp": "rlinf.models.config:MLPConfig",
    "categorical_mlp": "rlinf.models.config:CategoricalMLPConfig",
    "squashed_mlp": "rlinf.models.config:SquashedMLPConfig",
    "cnn": "rlinf.models.config:CNNConfig",
    "categorical_cnn": "rlinf.models.config:CategoricalCNNConfig",
    "pi0": "rlinf.models.vla.pi0.config:PI0Config",
    "pi05": "rlinf.models.vla.pi0.config:PI05Config",
    "qwen_vl": "rlinf.models.vla.qwen_vl.config:QwenVLConfig",
    "smolvla": "rlinf.models.vla.smolvla.config:SmolVLAConfig",
    "gr00t": "rlinf.models.vla.gr00t.config:GR00TConfig",
    "steered": "rlinf.models.steering_config:SteeredConfig",
    "wall_oss": "rlinf.models.vla.wall_oss.config:WallOSSConfig",
    "openvla": "rlinf.models.vla.openvla.config:OpenVLAConfig",
    "openvla_oft": "rlinf.models.vla.openvla.config:OpenVLAOFTConfig",
    "act": "rlinf.models.visuomotor.config:ACTConfig",
    "diffusion": "rlinf.models.visuomotor.config:DiffusionConfig",
}


PUBLISHED_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""What the weights of a published directory lie in: one file, or an index of several."""


def type_of_directory(directory: Path) -> str:
    """Which model a published directory holds, by what its config.json calls it; a ConfigError
    where none does, or where there are weights without that file, as openpi's."""
    place, known, said = directory.expanduser(), _published_names(), set[str]()
    names = "it has no config.json"
    if (place / "config.json").exists() or not _has_weights(place):
        said = _names_of_directory(directory)
        names = ", ".join(sorted(said - {"None"})) or "its config.json names none"
    if found := said & known.keys():
        return known[min(found)]
    raise ConfigError(
        f"{directory} is of no model that is known here ({names}); nearest: "
        f"{', '.join(sorted(known))}; where its layout names none, as openpi's, say which: "
        f"rlinf check model TYPE path={directory}"
    )


def require_type_of_directory(directory: Path, config: ModelConfig) -> None:
    """Refuse a directory whose config.json calls it another model than that of ``config``. One that
    is called nothing, as openpi's, is left to who reads the weights.

    Raises:
        ConfigError: It is of another model, whose type is named, or of one that is not known.
    """
    said, known = _names_of_directory(directory, key="path"), _published_names()
    named, found = said - {"None"}, said & known.keys()
    if config.published_as and named and not named & {*known, *config.also_called}:
        raise ConfigError(
            f"{directory} holds `{', '.join(sorted(named))}`, as its config.json says, and none of "
            f"the models that are known: {', '.join(sorted(known))}",
            key="path",
        )
    if found and not found & {*config.published_as, *config.also_called}:
        other = known[min(found)]
        raise ConfigError(
            f"{directory} holds `{min(found)}`, as its config.json says, and not {config.type}; "
            f"nearest: {other}, or the directory of a model of the type {config.type}",
            key="type",
        )


def _has_weights(directory: Path) -> bool:
    return any((directory / name).is_file() for name in PUBLISHED_WEIGHTS)


def _published_names() -> dict[str, str]:
    """The type of model by what config.json of published directories calls it."""
    return {each: name for name in REGISTRY.names() for each in REGISTRY.load(name).published_as}


def _names_of_directory(directory: Path, *, key: str = "") -> set[str]:
    """What the config.json of a published directory calls its model, in whichever program's key."""
    content = read_settings(directory.expanduser() / "config.json", key=key)
    said = {str(content.get(key)) for key in ("type", "model_type", "policy_type")}
    architectures = content.get("architectures")
    return said | set(map(str, architectures if isinstance(architectures, list) else ()))


REGISTRY = Registry("model", "rlinf.models", MODELS, ModelConfig)
"""Packages outside add models by entry points in this group that name their config classes."""
