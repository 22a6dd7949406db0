"""Recipe section of GR00T N1.5; imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.component import illegal
from rlinf.config.nearest import did_you_mean
from rlinf.models.config import Width
from rlinf.models.vla.config import WITH_STATISTICS, FlowConfig

if TYPE_CHECKING:
    from rlinf.models.vla.statistics import ModelStatistics

EMBODIMENTS = {
    "agibot_genie1": 26,
    "gr1": 24,
    "isaaclab_franka": 31,
    "libero_franka": 31,
    "maniskill_widowx": 30,
    "new_embodiment": 31,
    "oxe_droid": 17,
}
"""Which matrices of the published models belong to an embodiment, by its tag: those of Isaac-GR00T
N1.5, and of the models that RLinf published."""


class GR00TConfig(FlowConfig):
    """GR00T N1.5: a vision-language model reads, a diffusion transformer denoises actions."""

    implementation = "rlinf.models.vla.gr00t.policy:GR00TPolicy"
    published_as = ("gr00t_n1_5",)
    only_with: ClassVar = {
        **dict.fromkeys(("state_parts", "action_parts"), "statistics | path"),
        "normalization": WITH_STATISTICS,
    }
    type: Literal["gr00t"] = "gr00t"
    """Which policy this section configures."""
    embodiment: str = "new_embodiment"
    """Tag of the robot, which says whose matrices read the state and read and write actions, and
    whose statistics hold."""
    embodiment_id: int | None = Field(default=None, ge=0)
    """Number of these matrices, for a tag that is not known here."""
    denoising_steps: int = Field(default=4, ge=1)
    """K. Training runs as many passes of the transformer if all steps are random, one otherwise."""
    normalization: Literal["bounds", "quantiles", "mean_std"] = "bounds"
    """What −1 and 1 stand for in states and actions: the extremes (`min_max` in Isaac-GR00T), the
    quantiles 0.01 and 0.99 (`q99`), or one deviation about the mean."""
    state_parts: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Named parts of the statistics that make up a state, in the order of the environment's; null:
    all, in the order of the file."""
    action_parts: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The same of an action."""
    crop: float = Field(default=0.95, gt=0, le=1)
    """Share of each edge of a picture that is looked at, in the middle, as a model does that was
    trained on random crops of this size."""
    train_expert_only: bool = True
    """Leave vision and language model as they are (`tune_visual` and `tune_llm` false), as in the
    published training; the transformer that looks over what they say is trained."""
    value_head: tuple[Width, ...] = (1024, 512, 256)
    """Widths of the hidden layers of the value head, which begins afresh."""
    max_prompt_tokens: int = Field(default=160, ge=1)
    """Tokens that a prompt may have beside those of pictures."""

    @model_validator(mode="after")
    def _check_embodiment(self) -> Self:
        if self.embodiment_id is None and self.embodiment not in EMBODIMENTS:
            raise illegal(
                "embodiment",
                f"`{self.embodiment}` has no number that is known here",
                hint=f"give embodiment_id; {did_you_mean(self.embodiment, EMBODIMENTS)}",
            )
        return self

    @property
    def matrices(self) -> int:
        """Number of the embodiment's matrices."""
        known = self.embodiment_id
        return EMBODIMENTS[self.embodiment] if known is None else known

    @property
    def statistics_choice(self) -> dict[str, Any]:
        """Those of the embodiment, of the named parts."""
        key = self.statistics_key
        if key is None and self.statistics is None:
            key = self.embodiment
        return {"key": key, "action_parts": self.action_parts, "state_parts": self.state_parts}

    def prepared(self, found: ModelStatistics) -> ModelStatistics:
        """A dimension of the state that never moved is read as it is."""
        held = found.states
        if held is None or self.normalization == "bounds":
            return found
        low, high = (held.q01, held.q99) if self.normalization == "quantiles" else (0.0, held.std)
        if low is None or high is None:
            return found
        return replace(found, states=replace(held, mask=high != low))
