"""Policies that denoise actions by flow matching: how they do, and what their chains are worth.

Log-probs are those of πRL (https://arxiv.org/abs/2510.25889), with two differences to its code.
Which step is random is drawn for each row, not for a whole batch; and log-densities of several
steps are summed, as the probability of a chain is a product, where the code takes their mean.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlinf.errors import ConfigError, in_section
from rlinf.models.denoising import POINT, POINT_TIME, FlowPoints, TargetSpace
from rlinf.models.guidance import guided_velocity
from rlinf.models.policy import RAW_ACTIONS, ActionEvaluation, ActionSample, NoiseSpec
from rlinf.models.vla.config import FlowConfig
from rlinf.models.vla.flow_matching import (
    NoiseHead,
    entropy_of,
    noisy_actions,
    squashed_std,
    training_time,
    transition,
    transition_log_prob,
)
from rlinf.models.vla.pi0.network import PI0Size, Prefix
from rlinf.models.vla.policy import VLAPolicy
from rlinf.models.vla.preprocessing import square_pixels
from rlinf.models.vla.statistics import Method, ModelStatistics, Statistics, read_statistics

if TYPE_CHECKING:
    from rlinf.envs.spec import EnvSpec


class FlowPolicy(VLAPolicy):
    """Reads pictures, an instruction and the state once, and denoises a chunk of actions from that.

    A subclass gives the network and three passes of it: ``_network``, ``_prefix``, ``_denoise``;
    and, once it has called this constructor, its ``prompts``. The network has ``vision``,
    ``language`` and ``expert``, each with ``layers``, and its ``size``.
    """

    prompts: nn.Module
    """From observations to tokens and their mask, both [B, L]."""

    def __init__(
        self, config: FlowConfig, env_spec: EnvSpec, *, value_dim: int = 1, seed: int = 0
    ) -> None:
        super().__init__(config, env_spec, value_dim=value_dim, seed=seed)
        self._config = config
        self.network = self._network(config, env_spec, seed=seed)
        size = self.network.size
        self.horizon: int = size.horizon
        self._check(config, size)
        self._conventions = config.conventions
        self._places = list(config.conventions.dimensions or range(self.action_dim))
        self._statistics, self._normalisation = self._read_statistics(config, env_spec)
        self.noise_head: NoiseHead | None = None
        if config.method == "flow_noise":
            self.noise_head = NoiseHead(self._hidden_width, size.action_dim, seed=seed)
        if config.train_expert_only:
            self._freeze_readers()
        self.add_values(config, self._feature_width, seed=seed)

    # -- what a model is ----------------------------------------------------------------------

    @abstractmethod
    def _network(self, config: FlowConfig, env_spec: EnvSpec, *, seed: int) -> Any:
        """The network that the section names, or one of random weights."""

    @abstractmethod
    def _prefix(
        self, pixels: Sequence[Tensor], tokens: Tensor, mask: Tensor, states: Tensor
    ) -> Prefix:
        """Read pictures, each [B, 3, H, W], tokens of ``mask`` [B, L] and padded states [B, D]."""

    @abstractmethod
    def _denoise(
        self, prefix: Prefix, states: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Velocity [B, H, A'] float32 at time [B], and hidden states [B, H, W] of the expert."""

    def _pixels(self, view: Tensor) -> Tensor:
        """Pictures [B, H, W, 3] uint8 as they are read, [B, 3, H', W']."""
        return square_pixels(view, self.network.size.image)

    def _freeze_readers(self) -> None:
        """Leave what reads as it is."""
        for part in (self.network.vision, self.network.language):
            part.requires_grad_(False)

    @property
    def _reads_states(self) -> bool:
        """Whether states are read as numbers, padded to the dimensions of the model."""
        return True

    @property
    def _hidden_width(self) -> int:
        """Width of the hidden states that :meth:`_denoise` gives."""
        width: int = self.network.size.expert.width
        return width

    @property
    def _feature_width(self) -> int:
        """Width of what values are read from."""
        return self._hidden_width

    def _tokens(self, observations: Mapping[str, Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of a prompt and their mask, [B, L], with normalised states [B, D]."""
        tokens, mask = self.prompts(observations)
        return tokens, mask

    def _features(self, prefix: Prefix, states: Tensor) -> Tensor:
        """[B, W] that values are read from: what the expert makes of no action at all at the noise
        end, so that they depend on the observation alone."""
        size = self.network.size
        blank = states.new_zeros(len(states), size.horizon, size.action_dim)
        return self._denoise(prefix, states, blank, self._time(0, blank))[1].mean(1)

    def _check(self, config: FlowConfig, size: PI0Size) -> None:
        if size.horizon < self.chunk:
            raise ConfigError(
                f"{self.chunk} actions are to be executed, the model gives {size.horizon} at once; "
                f"nearest: {size.horizon}",
                key="model.num_action_chunks",
            )
        if self._reads_states and self.state_dim > size.state_dim:
            raise ConfigError(
                f"the environment's states have {self.state_dim} dimensions, the model reads "
                f"{size.state_dim}",
                key="model.type",
            )
        with in_section("model.conventions"):
            config.conventions.check_dimensions(self.action_dim, size.action_dim, self.state_dim)

    def _statistics_in(self, source: Path, config: FlowConfig) -> ModelStatistics:
        """Statistics in a directory or file."""
        return read_statistics(source, config.statistics_key)

    def _read_statistics(
        self, config: FlowConfig, env_spec: EnvSpec
    ) -> tuple[ModelStatistics | None, Method]:
        """None: the units of the environment are those of the model, as its box has no bounds."""
        source = config.statistics or config.path
        if source is None:
            bounds = Statistics(min=self.action_low.clone(), max=self.action_high.clone())
            known = bool(torch.isfinite(self.action_high - self.action_low).all())
            return (ModelStatistics(bounds) if known else None), "bounds"
        with in_section("model"):
            found = self._statistics_in(source, config)
        low, high = self.action_low.tolist(), self.action_high.tolist()
        if config.conventions.gripper is None and not config.conventions.delta_dimensions:
            found.check(
                low,
                high,
                dimensions=config.conventions.dimensions,
                state_dim=self.state_dim if getattr(config, "state_in_prompt", True) else 0,
                key="model.statistics",
            )
        return found, config.normalised_by

    # -- units --------------------------------------------------------------------------------

    def _states(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, D] normalised; [B, 0] where there are none."""
        if not self.state_dim:
            first = next(iter(observations.values()))
            return torch.zeros(len(first), 0, device=first.device)
        states = observations["states"].float()
        known = None if self._statistics is None else self._statistics.states
        return states if known is None else known.normalize(states, self._normalisation)

    def _to_env(self, x: Tensor, observations: Mapping[str, Tensor]) -> Tensor:
        """What was denoised [B, H, A'] as actions [B, C, A] of the environment."""
        actions = x[:, : self.chunk]
        if self._statistics is not None:
            actions = self._statistics.actions.unnormalize(actions, self._normalisation)
        found = self._conventions.to_env(actions, self.action_dim, observations.get("states"))
        return self.in_box(found)

    def _to_model(self, actions: Tensor, observations: Mapping[str, Tensor]) -> Tensor:
        """Actions [B, C, A] of the environment as what is to be denoised [B, H, A'].

        Where the model gives more actions than are executed, the last one is repeated.
        """
        size = self.network.size
        known = size.action_dim if self._statistics is None else self._statistics.actions.dim
        states = observations.get("states")
        found = self._conventions.to_model(actions.float(), known, states)
        if self._statistics is not None:
            found = self._statistics.actions.normalize(found, self._normalisation)
        last = found[:, -1:].expand(-1, size.horizon - found.shape[1], -1)
        return nn.functional.pad(torch.cat([found, last], dim=1), (0, size.action_dim - known))

    def _of_env(self, x: Tensor) -> Tensor:
        """[B, H, A'] of the model cut to what is executed, [B, C, A]."""
        return x[:, : self.chunk, self._places]

    # -- passes of the network ----------------------------------------------------------------

    def _read(self, observations: Mapping[str, Tensor]) -> tuple[Prefix, Tensor]:
        """Pictures and text of observations, once for all denoising steps, and padded states.

        A view that is left out takes no part, which is the same as one that is masked: positions
        count only what is there.
        """
        size, states = self.network.size, self._states(observations)
        tokens, mask = self._tokens(observations, states)
        states = nn.functional.pad(states, (0, size.state_dim - states.shape[-1]))
        views = [view for view in self.pictures_of(observations) if view is not None]
        pixels = [self._pixels(view) for view in views]
        return self._prefix(pixels, tokens, mask, states), states

    def _time(self, step: int | Tensor, like: Tensor) -> Tensor:
        """[B] the time 1 − k / K of denoising steps [B], or of one for all rows."""
        steps = self._config.denoising_steps
        places = torch.as_tensor(step, device=like.device).expand(len(like))
        return (steps - places).to(torch.float32) / steps

    def _step(
        self, prefix: Prefix, states: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and deviation of the random step from x, and the mean of the ODE's, [B, H, A']."""
        config = self._config
        velocity, hidden = self._denoise(prefix, states, x, time)
        of = partial(transition, x=x, velocity=velocity, time=time, steps=config.denoising_steps)
        learned = None
        if self.noise_head is not None:
            learned = squashed_std(self.noise_head(hidden).float(), config.noise_bounds)
        mean, std = of(config.method, noise_level=config.noise_level, learned_std=learned)
        return mean, std, of("ode")[0]

    def _values(self, prefix: Prefix, states: Tensor) -> Tensor:
        """[B, V]."""
        if not self.value_dim:
            return torch.zeros(len(states), 0, device=states.device)
        return self.values_of(self._features(prefix, states))

    # -- acting -------------------------------------------------------------------------------

    @property
    def noise(self) -> Mapping[str, NoiseSpec]:
        """Where denoising starts, the noise of its random steps, and which step that is."""
        chain = (self.horizon, self.network.size.action_dim)
        found = {"start": NoiseSpec(chain)}
        if self._config.method == "ode":
            return found
        if self._config.all_random:
            return found | {"steps": NoiseSpec((self._config.denoising_steps, *chain))}
        return found | {"steps": NoiseSpec((1, *chain)), "step_index": NoiseSpec((), "uniform")}

    @torch.inference_mode()
    def sample(
        self, observations: Mapping[str, Tensor], noise: Mapping[str, Tensor] | None
    ) -> ActionSample:
        """Denoise actions; without noise by the ODE from 0, the mode of where it starts."""
        prefix, states = self._read(observations)
        size, config = self.network.size, self._config
        blank = states.new_zeros(len(states), size.horizon, size.action_dim)
        x = blank if noise is None else noise["start"]
        which = self._drawn_step(noise)
        chain, log_probs = [x], torch.zeros_like(x)
        if noise is not None and config.method != "ode" and config.all_random:
            log_probs = transition_log_prob(x, blank, torch.ones_like(x))
        before, after = x, x
        for step in range(config.denoising_steps):
            mean, std, plain = self._step(prefix, states, x, self._time(step, x))
            if noise is None or config.method == "ode":
                x = plain
            elif which is None:
                x = mean + std * noise["steps"][:, step]
                log_probs = log_probs + transition_log_prob(x, mean, std)
            else:
                chosen = (which == step).reshape(-1, 1, 1)
                moved = mean + std * noise["steps"][:, 0]
                before = torch.where(chosen, x, before)
                log_probs = torch.where(chosen, transition_log_prob(moved, mean, std), log_probs)
                x = torch.where(chosen, moved, plain)
                after = torch.where(chosen, x, after)
            chain.append(x)
        kept = {"chain": torch.stack(chain, dim=1)}
        if which is not None:
            pair = torch.stack([before, after], dim=1)
            kept = {"chain": pair, "step_index": which, "denoised": x}
        return ActionSample(
            actions=self._to_env(x, observations),
            log_probs=self._of_env(log_probs),
            forward_inputs=kept,
            values=self._values(prefix, states) if noise is not None and self.value_dim else None,
        )

    @torch.no_grad()
    def sample_continuing(
        self, observations: Mapping[str, Tensor], prefix: Tensor, weights: Tensor
    ) -> ActionSample:
        """Denoise by the ODE from 0 a chunk that begins with actions [B, C, A] of the environment,
        as firmly as weights [B, C] say; see :func:`~rlinf.models.guidance.guided_velocity`."""
        read, states = self._read(observations)
        begun = self._to_model(prefix, observations)
        firmly = nn.functional.pad(weights, (0, self.horizon - self.chunk))
        steps, x = self._config.denoising_steps, torch.zeros_like(begun)
        for step in range(steps):
            time = self._time(step, x)

            def velocity(at: Tensor, time: Tensor = time) -> Tensor:
                return self._denoise(read, states, at, time)[0]

            bent = guided_velocity(
                velocity, x=x, time=1.0 - step / steps, prefix=begun, weights=firmly
            )
            x, _ = transition("ode", x=x, velocity=bent, time=time, steps=steps)
        actions = self._to_env(x, observations)
        return ActionSample(actions, torch.zeros_like(actions), {})

    def _drawn_step(self, noise: Mapping[str, Tensor] | None) -> Tensor | None:
        """[B] int64, the random step of each row; None where all are, or none is."""
        if noise is None or "step_index" not in noise:
            return None
        last = int(self._config.method == "flow_cps")  # whose last step has no noise
        choices = self._config.denoising_steps - last
        return (noise["step_index"] * choices).long().clamp(max=choices - 1)

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Log-probs of the random steps of stored chains, by one pass of the prefix."""
        if self._config.method == "ode":
            raise ConfigError(
                "the ODE has no random step whose log-prob could be trained; nearest: flow_sde",
                key="model.method",
            )
        prefix, states = self._read(forward_inputs)
        chain = forward_inputs["chain"].clone()  # it may have been sampled in inference mode
        which = forward_inputs.get("step_index")
        if which is not None:
            steps = [(self._time(which, chain), chain[:, 0], chain[:, 1])]
            log_probs = torch.zeros_like(chain[:, 0])
        else:
            steps = [
                (self._time(k, chain), chain[:, k], chain[:, k + 1])
                for k in range(self._config.denoising_steps)
            ]
            first = chain[:, 0]
            log_probs = transition_log_prob(first, torch.zeros_like(first), torch.ones_like(first))
        entropy = torch.zeros_like(log_probs)
        for time, before, after in steps:
            mean, std, _ = self._step(prefix, states, before, time)
            log_probs = log_probs + transition_log_prob(after, mean, std)
            entropy = entropy + entropy_of(std)
        values = self._values(prefix, states)
        return ActionEvaluation(self._of_env(log_probs), values, self._of_env(entropy))

    @torch.inference_mode()
    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, V] values of observations, without gradients."""
        return self._values(*self._read(observations))

    # -- supervised learning ------------------------------------------------------------------

    @property
    def imitation_noise(self) -> Mapping[str, NoiseSpec]:
        """The noise that actions come from, and the time at which the velocity is asked for."""
        chain = NoiseSpec((self.horizon, self.network.size.action_dim))
        return {"noise": chain, "time": NoiseSpec((), "uniform")}

    def _training_time(self, uniform: Tensor) -> Tensor:
        """Times at which is learned, from uniform numbers in [0, 1)."""
        return training_time(uniform)

    def imitation_errors(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, C, A] squared errors of the velocity (flow matching, arXiv 2410.24164, eq. 1)."""
        prefix, states = self._read(inputs)
        actions = self._to_model(inputs[RAW_ACTIONS], inputs)
        time = self._training_time(inputs["time"])
        x, wanted = noisy_actions(actions, inputs["noise"], time)
        velocity, _ = self._denoise(prefix, states, x, time)
        return self._of_env((velocity - wanted).square())

    # -- the noising of what was done ---------------------------------------------------------

    def forward(self, batch: Any, *, imitate: bool = False, velocity: bool = False) -> Any:
        """See :meth:`Policy.forward`; with ``velocity`` :meth:`velocity` at the points of a
        batch."""
        return self.velocity(batch.inputs) if velocity else super().forward(batch, imitate=imitate)

    def velocity(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See :meth:`~rlinf.models.denoising.Denoising.velocity`."""
        prefix, states = self._read(inputs)
        velocity, _ = self._denoise(prefix, states, inputs[POINT], inputs[POINT_TIME])
        return self._of_env(velocity)

    def points(
        self, inputs: Mapping[str, Tensor], *, target: TargetSpace, resampled: bool
    ) -> FlowPoints:
        """See :meth:`~rlinf.models.denoising.Denoising.points`."""
        config, chain, step = self._config, inputs["chain"], inputs.get("step_index")
        whole, steps = step is None, config.denoising_steps
        done = chain[:, -1] if whole else inputs["denoised"]
        if step is None or resampled:
            step = (inputs["time"] * steps).long().clamp(max=steps - 1)
        rows, time = torch.arange(len(chain), device=chain.device), self._time(step, chain)
        if resampled:
            x, wanted = noisy_actions(done, inputs["noise"], time)
            after = x
        else:
            x, after = (chain[rows, step + n] if whole else chain[:, n] for n in (0, 1))
            wanted = (x - done) / time.reshape(-1, 1, 1)
        moved = partial(
            transition, config.method, time=time, steps=steps, noise_level=config.noise_level
        )
        mean, std = moved(x=x, velocity=torch.zeros_like(x))
        scale = time
        if target == "xnext":  # the mean of the next step is linear in the velocity
            slope = moved(x=torch.zeros_like(x), velocity=torch.ones_like(x))[0]
            wanted, scale = (after - mean) / slope, slope[:, 0, 0].abs()
        return FlowPoints(x, time, self._of_env(wanted), scale, std[:, 0, 0])

    # -- training -----------------------------------------------------------------------------

    def repeated_layers(self) -> list[nn.Module]:
        """Layers of all three transformers."""
        parts = (self.network.vision, self.network.language, self.network.expert)
        return [layer for part in parts for layer in part.layers]

    def trained_beside_adapters(self) -> Iterator[nn.Parameter]:
        """What begins afresh: the value head and the deviation of Flow-Noise."""
        yield from self.value_parameters()
        if self.noise_head is not None:
            yield from self.noise_head.parameters()
