"""Recipe sections of π₀ and π₀.₅; imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlinf.config.component import illegal
from rlinf.models.vla.config import VLAConfig
from rlinf.models.vla.conventions import ActionConventions


class FlowConfig(VLAConfig):
    """What both have: actions are denoised in some steps, of which some are random."""

    implementation = "rlinf.models.vla.pi0_policy:PI0Policy"

    cameras: tuple[str | None, ...] = Field(default=("main_images",), min_length=1, max_length=3)
    """Image observations in the order in which the model was trained on views: base, left wrist,
    right wrist. null leaves a view out, as do those that are not named: it is not attended to."""
    horizon: int | None = Field(default=None, ge=1)
    """H, actions that are denoised together, of which `num_action_chunks` are executed; null: what
    `path` says, otherwise `num_action_chunks`."""
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
    conventions: ActionConventions = ActionConventions()
    """What the actions of the model are for the environment."""
    max_prompt_tokens: int = Field(default=48, ge=1)
    """Tokens that an instruction may have."""

    @property
    def all_random(self) -> bool:
        """Whether every denoising step is random."""
        chosen = self.random_steps or ("all" if self.method == "flow_noise" else "one")
        return chosen == "all"

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


class PI0Config(FlowConfig):
    """π₀: reads pictures, an instruction and the state; values are read from the expert."""

    published_as = ("pi0", "dexbotic_pi0")
    type: Literal["pi0"] = "pi0"
    """Which policy this section configures."""
    value_head: tuple[int, ...] = (512, 256, 128)
    """Widths of the hidden layers of the value head, which begins afresh."""


class PI05Config(FlowConfig):
    """π₀.₅: time enters by adaptive norms; values are read from the language model."""

    published_as = ("pi05",)
    type: Literal["pi05"] = "pi05"
    """Which policy this section configures."""
    value_head: tuple[int, ...] = (1024, 512, 256)
    """Widths of the hidden layers of the value head, which begins afresh."""
    state_in_prompt: bool = True
    """Tell the state in the instruction, each dimension as one of 256 numbers; it is otherwise not
    read. Published models differ: the one of LIBERO does not read it."""
    max_prompt_tokens: int = Field(default=200, ge=1)
    """Tokens that an instruction with its state may have."""
