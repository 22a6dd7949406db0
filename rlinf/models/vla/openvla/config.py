"""Recipe sections of OpenVLA and OpenVLA-OFT; imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from rlinf.config.component import illegal
from rlinf.models.vla.config import TokenConfig


class OpenVLAConfig(TokenConfig):
    """OpenVLA (Kim et al. 2024): one token after another for each action dimension."""

    implementation = "rlinf.models.vla.openvla.policy:OpenVLAPolicy"
    published_as = ("openvla",)
    also_called = ("openvla_oft",)
    type: Literal["openvla"] = "openvla"
    """Which policy this section configures."""
    center_crop: bool = False
    """Look at the middle of a picture, nine tenths of its area, as a model does that was trained on
    random crops of this size."""


class OpenVLAOFTConfig(OpenVLAConfig):
    """OpenVLA-OFT (Kim, Finn and Liang 2025): a whole chunk of actions in one pass."""

    implementation = "rlinf.models.vla.openvla.policy:OpenVLAOFTPolicy"
    published_as = ("openvla_oft",)
    also_called = ("openvla",)
    only_with: ClassVar = {"new_parts": "path"}
    type: Literal["openvla_oft"] = "openvla_oft"  # type: ignore[assignment]
    """Which policy this section configures."""
    head: Literal["tokens", "regression"] = "tokens"
    """How actions are read: as tokens, or by the perceptron that regresses them, which gives no
    log-probs, so that it imitates and is evaluated only."""
    proprioception: bool = False
    """Read `states` as one more token."""
    film: bool = False
    """Let the instruction modulate the vision transformers."""
    stop_token: bool = True
    """Let the end token stand behind the actions, as the published program does; models that RLinf
    published for LIBERO and ManiSkill were trained without."""
    new_parts: bool = False
    """Let head, projector of states and FiLM begin afresh where the directory has none, to be
    trained; otherwise a missing one is an error."""

    @property
    def told_states(self) -> bool:
        """As the section says."""
        return self.proprioception

    @property
    def state_scaling(self) -> str | None:
        """By the statistics of states that are read, where there are some."""
        found = self.read_statistics() if self.told_states else None
        return None if found is None or found.states is None else self.normalised_by

    @property
    def without_log_probs(self) -> tuple[str, str] | None:
        """What is regressed is not drawn."""
        return ("head", "tokens") if self.head == "regression" else None

    @model_validator(mode="after")
    def _check_draws(self) -> Self:
        if self.head == "regression" and (self.temperature != 1.0 or self.top_k):
            raise illegal(
                "head",
                "regression draws no tokens, but temperature or top_k is given",
                hint="leave them out, or head: tokens",
            )
        return self
