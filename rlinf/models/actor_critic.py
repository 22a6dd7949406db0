"""Actor and critic as separate trunks on features of observations, whatever the distribution."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.envs.results import TASK_IDS
from rlinf.errors import ConfigError, RunFailure
from rlinf.models.config import NormalizingConfig, TrunkPolicyConfig
from rlinf.models.observation_normalizer import ObservationNormalizer
from rlinf.models.policy import Policy

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec

Layer = TypeVar("Layer", torch.nn.Linear, torch.nn.Conv2d)


class _Tanh(torch.autograd.Function):
    """tanh x = 2 σ(2x) − 1.

    On a CPU torch evaluates σ six times as fast as tanh, which would cost as much as the matrix
    product before it. In float32 the two differ by rounding (1e-7).
    """

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        result = (x + x).sigmoid_().mul_(2.0).sub_(1.0)
        context.save_for_backward(result)
        return result

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        (result,) = context.saved_tensors
        return torch.ops.aten.tanh_backward(gradients[0], result)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent, elementwise; on the CPU by way of the logistic function.

    Not in half precision, where the difference to 1 would be rounded much more.
    """
    if x.device.type != "cpu" or x.dtype.itemsize < torch.float32.itemsize:
        return torch.tanh(x)
    result: Tensor = _Tanh.apply(x)  # type: ignore[no-untyped-call]
    return result


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": tanh,
    "relu": torch.relu,
    "elu": functional.elu,
    "silu": functional.silu,
    "gelu": functional.gelu,
}


def orthogonal_layer(layer: Layer, *, gain: float, generator: torch.Generator) -> Layer:
    """Fill a layer made on the meta device: orthogonal weights (Saxe et al. 2014), zero bias.

    A layer made there draws no random numbers of its own.
    """
    # Module.to_empty would import the symbolic shapes of the compiler: half a second, 40 MB.
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, torch.nn.Parameter(torch.empty(parameter.shape)))
    torch.nn.init.orthogonal_(layer.weight, gain, generator=generator)
    if layer.bias is not None:
        torch.nn.init.zeros_(layer.bias)
    return layer


class Trunk(torch.nn.Module):
    """Hidden layers with one non-linearity, and a linear last layer."""

    def __init__(
        self,
        input_dim: int,
        hidden_sizes: Sequence[int],
        output_dim: int,
        *,
        activation: str,
        hidden_gain: float,
        output_gain: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self._activation = ACTIVATIONS[activation]
        widths = [input_dim, *hidden_sizes, output_dim]
        gains = [hidden_gain] * len(hidden_sizes) + [output_gain]
        self.layers = torch.nn.ModuleList(
            orthogonal_layer(
                torch.nn.Linear(widths[i], widths[i + 1], device="meta"),
                gain=gain,
                generator=generator,
            )
            for i, gain in enumerate(gains)
        )

    def forward(self, features: Tensor) -> Tensor:
        """[B, input_dim] to [B, output_dim]; a RunFailure where it is given other features."""
        last, given = len(self.layers) - 1, features
        try:
            for i, layer in enumerate(cast(Iterable[torch.nn.Linear], self.layers)):
                # Called for every decision of a rollout: a layer's __call__ would cost as much.
                features = functional.linear(features, layer.weight, layer.bias)
                if i < last:
                    features = self._activation(features)
        except (RuntimeError, TypeError) as error:
            self._require_fit(given, error)
            raise
        return features

    def _require_fit(self, features: object, error: Exception) -> None:
        weight = cast(torch.nn.Linear, self.layers[0]).weight
        kind, wanted = type(features).__name__, f"[B, {weight.shape[1]}] {weight.dtype}"
        if isinstance(features, Tensor):
            if features.shape[-1] == weight.shape[1] and features.dtype == weight.dtype:
                return
            kind = f"{list(features.shape)} {features.dtype}"
        raise RunFailure(
            f"`encode` of a policy gives features {wanted}, as it told its base class by "
            f"`feature_dim`; here it gives {kind}"
        ) from error


class ActorCriticPolicy(Policy):
    """Base of the policies of two trunks: a subclass says what the actor's outputs mean, and how
    observations become features."""

    def __init__(
        self,
        config: TrunkPolicyConfig,
        env_spec: EnvSpec,
        *,
        outputs: int,
        feature_dim: int,
        value_dim: int,
        generator: torch.Generator,
        critic_dim: int | None = None,
    ) -> None:
        """Make the trunks.

        Args:
            config: Their section.
            env_spec: What the environments take.
            outputs: Numbers that the actor gives for a chunk.
            feature_dim: Width of :meth:`encode`.
            value_dim: V.
            generator: Of the weights.
            critic_dim: Width of :meth:`critic_features`; None: that of the actor's.
        """
        super().__init__()
        if value_dim not in (0, 1, config.num_action_chunks):
            raise ConfigError(
                f"a policy with num_action_chunks {config.num_action_chunks} cannot give "
                f"{value_dim} values per chunk; legal: 0, 1, {config.num_action_chunks}"
            )
        self.chunk = config.num_action_chunks
        self.action_dim = env_spec.action_dim
        self.value_dim = value_dim
        self.normalizer: ObservationNormalizer | None = None

        def trunk(input_dim: int, output_dim: int, output_gain: float) -> Trunk:
            return Trunk(
                input_dim,
                config.hidden_sizes,
                output_dim,
                activation=config.activation,
                hidden_gain=config.hidden_gain,
                output_gain=output_gain,
                generator=generator,
            )

        self.actor = trunk(feature_dim, outputs, config.policy_gain)
        self.critic = trunk(critic_dim or feature_dim, value_dim, 1.0) if value_dim else None

    @abstractmethod
    def encode(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Features [B, feature_dim] that the actor reads."""

    def critic_features(
        self, observations: Mapping[str, Tensor], shared: Tensor | None = None
    ) -> Tensor:
        """Features [B, critic_dim] that the critic reads: those of the actor, which may have been
        computed as ``shared``, unless a policy gives it others."""
        return self.encode(observations) if shared is None else shared

    def normalized(self, observations: Mapping[str, Tensor]) -> Tensor:
        """States [B, D], scaled by their running statistics where the policy keeps such."""
        states = observations["states"]
        if self.normalizer is None:
            return states
        scaled: Tensor = self.normalizer(states, observations.get(TASK_IDS))
        return scaled

    def update_normalizer(self, forward_inputs: Mapping[str, Tensor]) -> None:
        """Take states [N, D] into the running statistics."""
        if self.normalizer is not None:
            self.normalizer.update(forward_inputs["states"], forward_inputs.get(TASK_IDS))

    def _values(self, features: Tensor) -> Tensor:
        return (
            features.new_zeros(len(features), 0) if self.critic is None else self.critic(features)
        )

    def repeated_layers(self) -> list[torch.nn.Module]:
        """None: layers are not called by themselves, and the policy is gathered as one."""
        return []

    @torch.inference_mode()
    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, V] values of observations, without gradients."""
        if self.critic is None:
            first = next(iter(observations.values()))
            return torch.zeros(len(first), 0, device=first.device)
        return self._values(self.critic_features(observations))

    def value_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Parameters of the critic trunk."""
        return iter(()) if self.critic is None else self.critic.parameters()


class ReadsStates(ActorCriticPolicy):
    """Normalised states, and which of several tasks it is, as features; before the class that says
    what the distribution is in the order of the bases."""

    def __init__(
        self, config: NormalizingConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        tasks = told_tasks(env_spec)
        distribution: Callable[..., None] = super().__init__  # of the class beside this one
        distribution(
            config,
            env_spec,
            feature_dim=states_dim(env_spec, needed_by=config.type) + tasks,
            value_dim=value_dim,
            generator=torch.Generator().manual_seed(seed),
        )
        self._tasks, self.normalizer = tasks, normalizer_of(config, env_spec)

    def acts_on(self, observations: Collection[str]) -> tuple[str, ...]:
        """States, and which task it is."""
        return tuple(name for name in observations if name in ("states", TASK_IDS))

    def encode(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, D] states, normalised, and the task [B, tasks]."""
        return with_task(self.normalized(observations), observations, self._tasks)


def told_tasks(env_spec: EnvSpec) -> int:
    """Number of tasks that a policy tells apart by a one-hot vector; 0 where there is only one."""
    return len(env_spec.task_descriptions) if TASK_IDS in env_spec.observation_shapes else 0


def with_task(features: Tensor, observations: Mapping[str, Tensor], tasks: int) -> Tensor:
    """Features [B, D] and behind them the one-hot vector [B, tasks] of the present task."""
    if not tasks:
        return features
    told = torch.nn.functional.one_hot(observations[TASK_IDS].long(), tasks)
    return torch.cat([features, told.to(features.dtype)], dim=-1)


def normalizer_of(config: NormalizingConfig, env_spec: EnvSpec) -> ObservationNormalizer | None:
    """The normaliser of states [B, D] that a policy's section asks for."""
    if not config.normalize_observations:
        return None
    return ObservationNormalizer(
        env_spec.observation_shapes["states"][0],
        clip=config.observation_clip,
        task_sections=env_spec.task_sections,
    )


def states_dim(env_spec: EnvSpec, *, needed_by: str) -> int:
    """D of the ``states`` observation; ConfigError where the environment gives none."""
    shape = env_spec.observation_shapes.get("states")
    if shape is None or len(shape) != 1:
        given = {name: tuple(shape) for name, shape in env_spec.observation_shapes.items()}
        pictures = "" if needed_by == "squashed_mlp" else "; cnn reads pictures"
        raise ConfigError(
            f"model.type: {needed_by} reads the observation 'states' [D], but the environment "
            f"gives {given}; nearest: let the environment give states{pictures}"
        )
    return int(shape[0])
