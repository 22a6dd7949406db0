"""What the config sections of algorithms share, and which algorithms exist; imports no torch.

Algorithms train two *families* of policies: for actions (robots) and for tokens (language models).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor, log1p
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Optional, Self, TypeVar

from pydantic import BaseModel, Field, PrivateAttr, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.registry import Registry, load_component

if TYPE_CHECKING:
    from rlinf.algorithms.protocol import Algorithm
    from rlinf.models.config import ModelConfig

Family = Literal["actions", "tokens"]
RewardType = Literal["chunk_level", "action_level"]
BootstrapType = Literal["standard", "always", "none"]
KLType = Literal["k1", "abs", "k2", "k3", "low_var_kl"]
AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
Aggregation = Literal[AggregationMode, "seq-mean-token-sum-norm"]
Level = Literal["token_level", "action_level", "chunk_level"]
Proximal = Literal["rollout", "recomputed", "interpolated"]
ImportanceLevel = Literal["token", "sequence"]
ImportanceMode = Literal["truncate", "mask"]

T = TypeVar("T")
if TYPE_CHECKING:
    ByFamily = Annotated[T, "None only before the family is known, and for the other one"]
else:
    ByFamily = Optional


def by_family(*, nullable: bool = False, **arguments: Any) -> Any:
    """A field with a default for each family that understands it; the other one refuses the key.

    Args:
        nullable: Whether null is a value of its own and not just the default.
        **arguments: ``actions``, ``tokens`` or both: the defaults; and what ``Field`` takes.
    """
    defaults = {name: arguments.pop(name) for name in ("actions", "tokens") if name in arguments}
    words = {name: "null" if v is None else str(v).lower() for name, v in defaults.items()}
    text = ", ".join(f"{word} for {name}" for name, word in words.items())
    extra: Any = {"families": defaults, "nullable": nullable, "default_text": text}
    return Field(default=None, json_schema_extra=extra, **arguments)


def _families(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) and "families" in extra else {}


def _made(algorithm: Any, config: Any, *, group_size: int) -> None:
    """How an algorithm is made."""


class AlgorithmConfig(StrictModel):
    """Base of every algorithm's config section."""

    implementation: ClassVar[str]
    """``module:Class`` of the algorithm, imported when it is built."""
    families: ClassVar[tuple[Family, ...]] = ("actions",)
    """Whose policies the algorithm can train."""

    type: str
    """Which algorithm this section configures."""

    _family: Family | None = PrivateAttr(default=None)

    @property
    def family(self) -> Family | None:
        """For which the section was validated."""
        return self._family

    def unwritten(self, key: str) -> Any:
        """The default of the family; before that is known, whatever there is."""
        defaults = _families(type(self).model_fields[key]).get("families")
        if not defaults:
            return super().unwritten(key)
        return defaults.get(self.family) if self.family else getattr(self, key)

    @property
    def needs_values(self) -> bool:
        """Whether there must be a critic."""
        return False

    @property
    def needs_groups(self) -> bool:
        """Whether environments start, and prompts are answered, in groups that are compared."""
        return False

    @property
    def needs_whole_episodes(self) -> bool:
        """Whether an episode that no rollout holds whole is not trained on."""
        return self.needs_groups

    @property
    def compares_log_probs(self) -> bool:
        """Whether its loss is made of log-probs, so that a KL divergence can be told."""
        return True

    @property
    def needs_replay(self) -> bool:
        """Whether it learns from transitions of the whole run, and not from the newest rollout."""
        return False

    @property
    def from_the_first_step(self) -> tuple[str, ...]:
        """Overrides by which every step of a run trains all that any step does."""
        return ()

    def model_problems(self, model: ModelConfig) -> Iterator[PydanticCustomError]:
        """What stands against training a model of this section."""
        del model
        yield from ()

    def problems_of_training(
        self, *, steps: int, model: ModelConfig | None = None
    ) -> Iterator[PydanticCustomError]:
        """What else stands against a training of so many steps, of a model for actions, and not
        against an evaluation of what it left."""
        del steps, model
        yield from ()

    def of_family(self, family: Family) -> Self:
        """The section with the defaults of a family; an error where a key is not for it."""
        if self._family == family:
            return self
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).model_validate(given, context={"family": family})

    def build(self, *, family: Family | None = None, group_size: int = 1) -> Algorithm:
        """The algorithm, for a family (None: that of the section) and groups of consecutive
        environments that share their reset states; a ConfigError where it needs larger ones."""
        config = self if family is None else self.of_family(family)
        if config._family is None:
            raise ValueError(f"whether {self.type} is to train actions or tokens is not known yet")
        from rlinf.algorithms.protocol import Algorithm

        made = load_component(self.implementation, Algorithm, _made)
        algorithm: Algorithm = made(config, group_size=group_size)
        return algorithm

    @model_validator(mode="before")
    @classmethod
    def _of_family(cls, data: Any, info: ValidationInfo) -> Any:
        family = (info.context or {}).get("family")
        if family is None or not isinstance(data, Mapping):
            return data
        if family not in cls.families:
            name = cls.model_fields["type"].default
            raise illegal("type", f"{name} trains {cls.families[0]}, this run trains {family}")
        filled = dict(data)
        for name, field in cls.model_fields.items():
            about = _families(field)
            if not about:
                continue
            if family not in about["families"]:
                if data.get(name) is not None:
                    raise illegal(name, f"has no meaning for {family}", hint="leave it out")
            elif name not in data or (data[name] is None and not about["nullable"]):
                filled[name] = about["families"][family]
        return filled

    def model_post_init(self, context: Any) -> None:
        """Remember the family."""
        self._family = (context or {}).get("family")


@dataclass(frozen=True, eq=False)
class FamilySection(Component):
    """Annotation of a run's algorithm section: it is validated for the family of the run."""

    family: Family

    def section(self, value: Any) -> BaseModel:
        """See :meth:`Component.section`."""
        if isinstance(value, AlgorithmConfig):
            return value.of_family(self.family)
        return self.class_of(value).model_validate(value, context={"family": self.family})


class PolicyConfig(AlgorithmConfig):
    """Base of the algorithms with a policy loss of probability ratios."""

    families: ClassVar[tuple[Family, ...]] = ("actions", "tokens")
    only_with: ClassVar = {
        "kl_penalty_type": "kl_beta",
        "kl_reward_type": "kl_reward_beta",
        "loss_agg_length": "loss_agg_func: seq-mean-token-sum-norm",
        "max_resample": "dynamic_sampling: true",
        **{
            f"importance_sampling_{name}": "importance_sampling: token | sequence"
            for name in ("clip", "min", "mode")
        },
    }

    clip_ratio_low: float = Field(default=0.2, gt=0, lt=1)
    """ε by which the probability ratio may fall below 1."""
    clip_ratio_high: float = Field(default=0.2, gt=0)
    """ε by which the probability ratio may rise above 1; larger than `clip_ratio_low` it is
    known as clip-higher."""
    clip_log_ratio_min: float | None = Field(default=None, lt=0, ge=-20)
    """Lower bound of the logarithm of the ratio; null: −20."""
    clip_log_ratio_max: float | None = Field(default=None, gt=0, le=20)
    """Upper bound of the logarithm of the ratio; null: 20."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy in the loss; refused where the model does not learn how far its actions
    deviate, or has no entropy in closed form."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy in the loss."""
    kl_penalty_type: KLType = "low_var_kl"
    """Estimator of that KL divergence; over what the policy itself draws the gradient of k1 is 0 in
    the mean, that of k2 is the divergence's."""
    loss_agg_func: Aggregation = "token-mean"
    """Mean over all terms of the global batch; or over rows (answers, chunk steps) of the sum or
    mean of their terms; or of their sum divided by `loss_agg_length` (seq-mean-token-sum-norm)."""
    loss_agg_length: int | None = Field(default=None, gt=0)
    """Constant that seq-mean-token-sum-norm divides by: of tokens, the longest response."""
    normalize_advantages: ByFamily[bool] = by_family(actions=False, tokens=False)
    """Bring the advantages of a rollout to mean 0 and standard deviation 1."""

    logprob_type: ByFamily[Level] = by_family(actions="chunk_level")
    """Actions: what one probability ratio belongs to: one action dimension (token_level), one
    primitive action (action_level), or the whole chunk (chunk_level)."""
    entropy_type: ByFamily[Level] = by_family(actions="chunk_level")
    """Actions: what one entropy belongs to, as `logprob_type`."""
    weight_by_episode_length: ByFamily[bool] = by_family(actions=True)
    """Actions: without automatic reset, give every environment's rollout the same share in the loss
    however early its episode ended."""

    kl_reward_beta: ByFamily[float] = by_family(tokens=0.0, ge=0)
    """Tokens: weight of the KL divergence from the reference policy in the reward: per token where
    rewards are, else summed over the sequence."""
    kl_reward_type: ByFamily[KLType] = by_family(tokens="k1")
    """Tokens: estimator of that KL divergence."""
    overlong_filter: ByFamily[bool] = by_family(tokens=False)
    """Tokens: do not train on sequences that the token limit cut off; their rewards still count in
    their group."""
    dynamic_sampling: ByFamily[bool] = by_family(tokens=False)
    """Tokens: train only on groups whose rewards differ; other prompts are drawn for the rest."""
    max_resample: ByFamily[int] = by_family(tokens=5, ge=0)
    """Tokens: how many times, at least once, the prompt of one position may be drawn again in a
    step with `dynamic_sampling`; the last group is trained on whatever its rewards. With
    `rollout.partial` groups have no position yet: then a step may draw so many times as many
    prompts again as it has positions."""
    proximal: ByFamily[Proximal] = by_family(actions="rollout", tokens="rollout")
    """What the probability ratio divides by: log-probs of the policy that acted (rollout), those
    that the trainer recomputes before the first update, or, without that forward pass, an
    interpolation between those that acted and the present ones by the staleness of each term.
    Actions: of present weights in float32 those of the rollout are taken for the trainer's."""
    importance_sampling: ByFamily[ImportanceLevel | None] = by_family(actions=None, tokens=None)
    """Weight the loss of each token or sequence by its probability under the proximal policy over
    that under the policy that acted; null: off. Actions: of what a ratio belongs to, see
    `logprob_type`, or of a whole chunk (sequence)."""
    importance_sampling_clip: ByFamily[float] = by_family(actions=2.0, tokens=2.0, gt=0)
    """Largest such weight."""
    importance_sampling_min: ByFamily[float] = by_family(actions=0.0, tokens=0.0, ge=0)
    """Smallest such weight."""
    importance_sampling_mode: ByFamily[ImportanceMode] = by_family(
        actions="truncate", tokens="truncate"
    )
    """A weight out of bounds is set to the bound (truncate) or to 0 (mask)."""
    early_stop_imp_ratio: float | None = by_family(actions=None, tokens=5.0, nullable=True, gt=1)
    """An update is not applied where the mean ratio of its global batch exceeds this; null: never
    refused."""

    def model_problems(self, model: ModelConfig) -> Iterator[PydanticCustomError]:
        """Actions without log-probs."""
        if model.without_log_probs is not None:
            key, nearest = model.without_log_probs
            yield illegal(
                f"model.{key}",
                f"{getattr(model, key)} gives no log-probs, by which {self.type} learns; such a "
                "model imitates and is evaluated",
                hint=f"nearest: {nearest}",
            )

    def problems_of_training(
        self, *, steps: int, model: ModelConfig | None = None
    ) -> Iterator[PydanticCustomError]:
        """An entropy that no bonus raises, and a sample that may not be drawn again."""
        yield from super().problems_of_training(steps=steps, model=model)
        if self.needs_entropy and model is not None and model.without_entropy is not None:
            key, why, nearest = model.without_entropy
            yield illegal(
                "algorithm.entropy_bonus",
                f"would not raise the entropy with model.{key}: {getattr(model, key)}, {why}",
                hint="nearest: 0" + (f", or model.{key}: {nearest}" if nearest else ""),
            )
        if self.dynamic_sampling and self.max_resample == 0:
            yield illegal(
                "algorithm.max_resample",
                "is 0, with which dynamic_sampling draws no other prompt",
                hint="nearest: 1, or dynamic_sampling: false",
            )

    @property
    def needs_reference(self) -> bool:
        """Whether batches must carry log-probs of the reference policy."""
        return self.kl_beta > 0 or bool(self.kl_reward_beta)

    @property
    def needs_proximal(self) -> bool:
        """Whether the trainer must recompute log-probs before the first update."""
        return self.proximal == "recomputed"

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the entropy."""
        return self.entropy_bonus > 0

    @property
    def prepares_parts(self) -> bool:
        """Whether some groups can be prepared, and trained on, before the others are there."""
        whole = self.needs_values or self.normalize_advantages or bool(self.kl_reward_beta)
        return not (whole or self.needs_proximal)

    @property
    def importance(self) -> tuple[ImportanceLevel, float, float, ImportanceMode] | None:
        """Level, smallest and largest weight of the loss, and what becomes of one out of bounds."""
        if self.importance_sampling is None:
            return None
        low, high = self.importance_sampling_min, self.importance_sampling_clip
        return self.importance_sampling, low, high, self.importance_sampling_mode

    @model_validator(mode="after")
    def _check_aggregation(self) -> Self:
        if self.loss_agg_func == "seq-mean-token-sum-norm" and self.loss_agg_length is None:
            raise illegal(
                "loss_agg_length",
                "seq-mean-token-sum-norm divides by a constant length",
                hint="write the largest number of new tokens",
            )
        return self

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        mode = self.loss_agg_func
        alike = mode == "seq-mean-token-mean" or (
            mode == "seq-mean-token-sum" and self.entropy_type == "chunk_level"
        )
        if self.logprob_type == "chunk_level" and alike:
            raise illegal(
                "loss_agg_func",
                f"{mode} has no effect with logprob_type: chunk_level, where a row is one term",
                hint="nearest: token-mean, or logprob_type: action_level",
            )
        return self

    @model_validator(mode="after")
    def _check_importance_sampling(self) -> Self:
        if self._family is None or self.importance_sampling is None:
            return self
        if self.proximal == "rollout":
            raise illegal(
                "importance_sampling",
                "every weight is 1 where the proximal policy is the one that acted",
                hint="write proximal: recomputed, or importance_sampling: null",
            )
        if self.importance_sampling == "sequence" and self.logprob_type == "chunk_level":
            raise illegal(
                "importance_sampling",
                "sequence is the same as token with logprob_type: chunk_level, where a row is one "
                "term",
                hint="nearest: token, or logprob_type: action_level",
            )
        if self.importance_sampling_min > self.importance_sampling_clip:
            raise illegal(
                "importance_sampling_min",
                f"{self.importance_sampling_min} lies above importance_sampling_clip",
                hint=f"nearest: {self.importance_sampling_clip}",
            )
        return self


class ClippedConfig(PolicyConfig):
    """Base of the algorithms with the clipped surrogate loss."""

    clip_ratio_c: float | None = Field(default=None, gt=1)
    """Dual clip: the loss of a term with negative advantage A is at most c|A|; null: off."""

    @model_validator(mode="after")
    def _check_clip_order(self) -> Self:
        if self.clip_ratio_c is not None and self.clip_ratio_c < 1 + self.clip_ratio_high:
            raise illegal(
                "clip_ratio_c",
                f"the dual clip {self.clip_ratio_c} lies below 1 + clip_ratio_high = "
                f"{1 + self.clip_ratio_high}, where ratios are not clipped yet",
                hint=f"nearest: {1 + self.clip_ratio_high}, or null",
            )
        return self

    def problems_of_training(
        self, *, steps: int, model: ModelConfig | None = None
    ) -> Iterator[PydanticCustomError]:
        """A bound of log-ratios within the clip, which would then never bind."""
        yield from super().problems_of_training(steps=steps, model=model)
        low, high = log1p(-self.clip_ratio_low), log1p(self.clip_ratio_high)
        if self.clip_log_ratio_min is not None and self.clip_log_ratio_min > low:
            yield illegal(
                "algorithm.clip_log_ratio_min",
                f"{self.clip_log_ratio_min} lies above log(1 - clip_ratio_low) = {low:.4g}, so "
                "that no ratio would be clipped from below",
                hint=f"nearest: {floor(low * 1e4) / 1e4:g}, or null",
            )
        if self.clip_log_ratio_max is not None and self.clip_log_ratio_max < high:
            yield illegal(
                "algorithm.clip_log_ratio_max",
                f"{self.clip_log_ratio_max} lies below log(1 + clip_ratio_high) = {high:.4g}, so "
                "that no ratio would be clipped from above",
                hint=f"nearest: {ceil(high * 1e4) / 1e4:g}, or null",
            )


ALGORITHMS = {
    "ppo": "rlinf.algorithms.config:PPOConfig",
    "grpo": "rlinf.algorithms.config:GRPOConfig",
    "dapo": "rlinf.algorithms.config:DAPOConfig",
    "dr_grpo": "rlinf.algorithms.config:DrGRPOConfig",
    "reinforce_pp": "rlinf.algorithms.config:ReinforcePPConfig",
    "rloo": "rlinf.algorithms.config:RLOOConfig",
    "gspo": "rlinf.algorithms.config:GSPOConfig",
    "cispo": "rlinf.algorithms.config:CISPOConfig",
    "decoupled_ppo": "rlinf.algorithms.config:DecoupledPPOConfig",
    "distillation": "rlinf.algorithms.config:DistillationConfig",
    "nft": "rlinf.algorithms.denoising.config:NFTConfig",
    "dsrl": "rlinf.algorithms.denoising.config:DSRLConfig",
    "sac": "rlinf.algorithms.config:SACConfig",
}
"""A package outside adds one by an entry point in the group ``rlinf.algorithms`` that names its
config class."""

REGISTRY = Registry("algorithm", "rlinf.algorithms", ALGORITHMS, AlgorithmConfig)

ActionAlgorithm = Annotated[AlgorithmConfig, FamilySection(REGISTRY, "actions")]
"""The algorithm section of a run that trains policies for actions."""
TokenAlgorithm = Annotated[PolicyConfig, FamilySection(REGISTRY, "tokens")]
"""The algorithm section of a run that trains language models."""
