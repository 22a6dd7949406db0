"""``rlinf eval`` of a reasoning run: pass rates on held-out prompts."""

from __future__ import annotations

from pathlib import Path

from rlinf.checkpoint.reading import Checkpoint
from rlinf.config.dump import to_data
from rlinf.data.text_evaluation import TextEvaluationResult, TextEvaluationSpec, compare_text
from rlinf.errors import ConfigError
from rlinf.models.language import load_tokenizer
from rlinf.runners.evaluated_runs import evaluate_and_compare, keep_result, name_of, run_of
from rlinf.runners.reasoning import FAILURES, INITIAL_MODEL
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.reasoning_evaluation import evaluate_model, validation_spec
from rlinf.runners.reasoning_model import initial_model, prompt_sets
from rlinf.runners.reasoning_system import ReasoningSystem


def evaluate(
    source: Path,
    *,
    episodes: int | None = None,
    spec: Path | None = None,
    video: bool = False,
    compare: Path | None = None,
) -> TextEvaluationResult:
    """Evaluate a run or a checkpoint, print the result and write it to the run's directory.

    Args:
        source: A run directory, or one of its checkpoints.
        episodes: Number of held-out prompts; by default what the run's configuration says.
        spec: File with the exact list of prompts, instead.
        video: Refused: text has none.
        compare: Another run or checkpoint to compare with on the same prompts.

    Raises:
        ConfigError: The specification is of other prompts than the run has, or of another reward.
        CheckpointError: There is no good checkpoint.
    """
    if video:
        raise ConfigError("--video: a language model shows nothing; leave it out")
    given = None if spec is None else TextEvaluationSpec.load(spec)

    def evaluate_one(
        config: ReasoningConfig, checkpoint: Checkpoint, first: bool
    ) -> TextEvaluationResult:
        nonlocal given
        del first
        model = initial_model(config, run_of(checkpoint) / INITIAL_MODEL)
        tokenizer = load_tokenizer(model)
        dataset = prompt_sets(config, tokenizer).validation
        if dataset is None:
            raise ConfigError(
                "the run has no validation prompts; name files in data.files.validation"
            )
        given = given or validation_spec(_with_prompts(config, episodes), dataset)
        given.check_dataset(dataset)
        _check_reward(given, config)
        with ReasoningSystem(config, model, run_of(checkpoint) / FAILURES) as system:
            system.load_state(checkpoint.tree["system"], checkpoint.path)
            system.sync_weights()
            result = evaluate_model(system, given, dataset, name_of(checkpoint), tokenizer)
        keep_result(result, given, checkpoint)
        return result

    return evaluate_and_compare(source, compare, ReasoningConfig, evaluate_one, compare_text)


def _with_prompts(config: ReasoningConfig, prompts: int | None) -> ReasoningConfig:
    """A run's config with another number of held-out prompts."""
    if prompts is None:
        return config
    validation = config.validation.model_copy(update={"prompts": prompts})
    return config.model_copy(update={"validation": validation})


def _check_reward(spec: TextEvaluationSpec, config: ReasoningConfig) -> None:
    own = to_data(config.reward)["functions"]
    if spec.reward != own:
        raise ConfigError(
            f"the evaluation specification is for the reward {dict(spec.reward)}, the run has "
            f"{own}: evaluate a run of that reward, or write a specification for this one"
        )
