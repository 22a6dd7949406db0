"""Recipe section of GR00T N1.5; imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.component import illegal
from rlinf.config.nearest import did_you_mean
from rlinf.errors import ConfigError
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
    "so100": 2,
    "unitree_g1": 3,
}
"""Which matrices of the published models belong to an embodiment, by its tag: those of Isaac-GR00T
N1.5, also in lerobot, and of the models that RLinf published."""
_OF_LEROBOT, _NEW = "groot", "new_embodiment"


class GR00TConfig(FlowConfig):
    """GR00T N1.5: a vision-language model reads, a diffusion transformer denoises actions."""

    implementation = "rlinf.models.vla.gr00t.policy:GR00TPolicy"
    published_as = ("gr00t_n1_5", _OF_LEROBOT)
    only_with: ClassVar = {
        **dict.fromkeys(("state_parts", "action_parts"), "statistics | path"),
        "normalization": WITH_STATISTICS,
    }
    type: Literal["gr00t"] = "gr00t"
    """Which policy this section configures."""
    embodiment: str | None = None
    """Tag of the robot, which says whose matrices read the state and read and write actions, and
    whose statistics hold; null: `embodiment_tag` in config.json of `path`, as lerobot has it,
    otherwise `new_embodiment`."""
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
        given = self.embodiment or _NEW
        if self.embodiment_id is None and given not in EMBODIMENTS:
            raise illegal(
                "embodiment",
                f"`{given}` has no number that is known here",
                hint=f"give embodiment_id; {did_you_mean(given, EMBODIMENTS)}",
            )
        return self

    def check(self) -> None:
        """Look for what is named, and for the embodiment that `path` names."""
        super().check()
        _ = self.matrices

    @property
    def tag(self) -> str:
        """Of the embodiment."""
        said = {} if self.embodiment or self.path is None else self.settings()
        return self.embodiment or str(said.get("embodiment_tag", _NEW))

    @property
    def matrices(self) -> int:
        """Number of the embodiment's matrices; ConfigError where `path` names one without."""
        known = EMBODIMENTS.get(self.tag) if self.embodiment_id is None else self.embodiment_id
        if known is None:
            raise ConfigError(
                f"is null, and {self.path} has embodiment_tag: {self.tag} in its config.json, "
                f"whose number is not known here; nearest: {', '.join(EMBODIMENTS)}, or its number "
                "as embodiment_id",
                key="embodiment",
            )
        return known

    @property
    def statistics_choice(self) -> dict[str, Any]:
        """Those of the embodiment, of the named parts; a directory of lerobot has one set."""
        key = self.statistics_key
        alone = self.path is not None and self.settings().get("type") == _OF_LEROBOT
        if key is None and self.statistics is None and not alone:
            key = self.tag
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
