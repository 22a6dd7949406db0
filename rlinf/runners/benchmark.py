"""The benchmark task: a model answers published questions, and nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from rlinf.agents.tool import AgentConfig
from rlinf.checkpoint.config import CheckpointConfig
from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.dump import to_data
from rlinf.data.prompts.benchmarks import BenchmarkConfig
from rlinf.data.prompts.dataset import PromptDataset
from rlinf.data.text_evaluation import AnswerKind, TextEvaluationResult, TextEvaluationSpec
from rlinf.engines import config as engines
from rlinf.engines.config import EngineConfig, HFEngineConfig, SamplingConfig
from rlinf.errors import in_section
from rlinf.flow.graph import Flow
from rlinf.flow.placed_config import PlacedConfig, RunnerConfig
from rlinf.models.language_config import LanguageModelConfig
from rlinf.monitor.loggers.base import LoggerConfig
from rlinf.monitor.run_directory import RunDirectory
from rlinf.rewards.config import CorrectnessConfig, RewardConfig
from rlinf.runners.evaluation import save_printed
from rlinf.runners.reasoning_evaluation import answer_prompts, answering_step
from rlinf.runners.task import Task
from rlinf.workers.config.answering import (
    calling_problems,
    check_described,
    equal_samples_problems,
    unserved_problems,
)

COMPONENTS = ("rollout", "reward")


class BenchmarkRolloutConfig(StrictModel):
    """How questions are answered."""

    samples: int = Field(default=1, ge=1)
    """n, completions of each question."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    engine: Annotated[EngineConfig, Component(engines.REGISTRY)] = HFEngineConfig()
    """What generates."""
    agent: AgentConfig | None = None
    """Tools that answers may call, turn by turn; null: an answer is one turn."""


class BenchmarkRunConfig(CorrectnessConfig, PlacedConfig):
    """An evaluation of a model on a published benchmark."""

    task: Literal["benchmark"]
    """Which runner executes the recipe."""
    runner: RunnerConfig = RunnerConfig()
    """Where the result is written."""
    benchmark: BenchmarkConfig
    """The questions."""
    model: LanguageModelConfig
    """What answers: a directory with a model, such as `model` of a run."""
    rollout: BenchmarkRolloutConfig = BenchmarkRolloutConfig()
    reward: RewardConfig
    """What tells right from wrong."""

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the evaluation."""
        return COMPONENTS

    @property
    def template_arguments(self) -> dict[str, Any]:
        """See :attr:`ChatTemplateConfig.template_arguments`."""
        return self.benchmark.template_arguments

    def batch_table(self) -> list[tuple[str, str]]:
        """Rows that show what is sampled."""
        questions = "all" if self.benchmark.limit is None else f"the first {self.benchmark.limit}"
        return [
            ("benchmark", f"{self.benchmark.format}, {self.benchmark.path}"),
            ("questions", questions),
            ("completions", f"{self.rollout.samples} of each question"),
            ("new tokens", f"up to {self.rollout.sampling.max_new_tokens} per completion"),
        ]

    def check(self) -> None:
        """Look also whether tools can be called as the model is told."""
        super().check()
        check_described(self.rollout.agent, self.benchmark)

    def problems(self) -> Iterator[PydanticCustomError]:
        """See :meth:`PlacedConfig.problems`."""
        yield from self.correctness_problems(self.reward)
        sampling, engine = self.rollout.sampling, self.rollout.engine
        yield from equal_samples_problems(sampling, self.rollout.samples, "rollout.")
        yield from unserved_problems(engine, sampling, "rollout.")
        yield from calling_problems(self.rollout.agent, self.benchmark, "benchmark.")
        for section in ("lora", "architecture"):
            if getattr(self.model, section) is not None:
                yield illegal(f"model.{section}", "has no effect here", hint="leave it out")
        if (key := engine.unloaded) is not None:
            why = "would evaluate random weights, as none are sent to the engine"
            yield illegal(f"rollout.engine.{key}", why, hint="leave it out")
        without_effect = {
            "checkpoint": self.checkpoint != CheckpointConfig(),
            "logger": self.logger != LoggerConfig(),
            "cluster.plan": self.auto_plan is not None,
            "runner.timeline": self.runner.timeline,
        }
        for key in (key for key, given in without_effect.items() if given):
            yield illegal(key, "has no effect on an evaluation", hint="leave it out")


class Benchmark(Task[BenchmarkRunConfig]):
    """Evaluates a model on a published benchmark: pass@k, mean@n and maj@n over its questions."""

    config_class = BenchmarkRunConfig
    groups: ClassVar = {
        "rollout": "rlinf.workers.generation:GenerationWorker",
        "reward": "rlinf.workers.reward:RewardWorker",
    }
    weights = None
    trains = False
    changeable = ()

    @classmethod
    def evaluation(cls, flow: Flow, config: BenchmarkRunConfig) -> None:
        """Answers to the questions are generated and scored."""
        answering_step(flow)

    def evaluate_alone(self, directory: RunDirectory) -> None:
        """Answer every question, print the rates and write specification and result down."""
        from rlinf.models.language import load_tokenizer
        from rlinf.runners.groups import Groups
        from rlinf.runners.reasoning_model import check_context

        config, rollout = self.config, self.config.rollout
        with in_section("model"):
            tokenizer = load_tokenizer(config.model)
        with in_section("benchmark"):
            dataset = config.benchmark.build(tokenizer)
        check_context(
            dataset,
            rollout.sampling,
            model=config.model,
            engine=rollout.engine,
            key="rollout.sampling",
        )
        spec = benchmark_spec(config, dataset)
        spec.save(directory.evaluations / "spec.json")
        with Groups(self, trains=False, traces=directory.traces) as groups:
            result = answer_prompts(groups, spec, dataset, str(config.model.path), tokenizer)
        _tell(f"{config.benchmark.format}, {len(dataset)} questions, {config.model.path}", result)
        save_printed(result, directory.evaluations / "result.json")
        print(f"written to {directory.evaluations}", flush=True)


def _tell(title: str, result: TextEvaluationResult) -> None:
    print(title)
    for metric in result.metrics:
        print(f"  {result.estimate(metric)}")
    print(
        f"  {result.truncated_share:.1%} of the completions were cut off, mean length "
        f"{result.mean_length:.0f} tokens, {result.n_invalid} not scored",
        flush=True,
    )


def benchmark_spec(config: BenchmarkRunConfig, dataset: PromptDataset) -> TextEvaluationSpec:
    """Every question of a benchmark, with the answers that votes need."""
    kind: AnswerKind = "letter" if config.benchmark.format == "gpqa_diamond" else "math"
    return TextEvaluationSpec.of(
        dataset,
        samples=config.rollout.samples,
        sampling=to_data(config.rollout.sampling),
        reward=config.reward.specified(),
        threshold=config.correct_from,
        part=config.decides(config.reward),
        seed=config.seed,
        answers=kind if config.rollout.samples > 1 else None,
    )
