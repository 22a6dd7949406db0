"""What a reasoning recipe refuses, before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf.config.load import load_recipe
from rlinf.config.validate import check, validate
from rlinf.errors import UserError
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.task import REGISTRY

from .reasoning_support import small_config, write_recipe

REFUSED = [
    (
        ["validation.samples=4", "validation.sampling={greedy: true}"],
        "validation.samples",
        "4 greedy completions are all the same; nearest: 1",
    ),
    (["rollout.group_size=1"], "rollout.group_size", "at least 2"),
    (
        ["rollout.group_size=1", "algorithm={type: reinforce_pp, dynamic_sampling: true}"],
        "rollout.group_size",
        "is 1, but algorithm.dynamic_sampling trains on prompts whose answers have different "
        "rewards; at least 2, or algorithm.dynamic_sampling: false",
    ),
    (["rollout.sampling.greedy=true"], "rollout.sampling.greedy", "nearest: false"),
    (["rollout.sampling.top_k=1"], "rollout.sampling.top_k", "nearest: 0, of all tokens"),
    (["rollout.prompts=0"], "rollout.prompts", ""),
    (["rollout.promts=4"], "rollout.promts", "did you mean `prompts`"),
    (["rollout.engine={type: hff}"], "rollout.engine.type", "did you mean `hf`"),
    (["rollout.engine={type: hf, block: 4}"], "rollout.engine.block", "block_size"),
    (["rollout.sampling.min_new_tokens=20"], "rollout.sampling.min_new_tokens", "nearest: 12"),
    (["rollout.sampling.temperature=0"], "rollout.sampling.temperature", ""),
    (["algorithm={type: ppo}"], "critic", "write `critic: {}`"),
    (["critic={}"], "critic", "leave the section out"),
    (
        ["algorithm={type: ppo, critic_warmup_steps: 4}", "critic={}"],
        "algorithm.critic_warmup_steps",
        "4 leaves none of the 4 training steps of the run in which the policy is trained; "
        "nearest: 3",
    ),
    (["algorithm={type: gppo}"], "algorithm.type", "did you mean"),
    (["algorithm={type: dr_grpo}"], "algorithm.loss_agg_length", "largest number of new tokens"),
    (["actor.n_minibatches=3"], "actor.n_minibatches", "nearest: 2, 4"),
    (["actor.micro_batch_size=2", "actor.max_tokens_per_micro_batch=9"], "actor", "same thing"),
    (["actor.type=fdsp"], "actor.type", "did you mean `fsdp`"),
    (["actor.optim.value_lr=0.1"], "actor.optim.value_lr", "critic"),
    (["model.lora={rank: 4}"], "model.lora", "actor.lora"),
    (["model.architecture=null"], "model.path", "is missing"),
    (["model.architecture.hidden_size=30"], "model.architecture.hidden_size", "nearest"),
    (["data.task={type: sortng}"], "data.task.type", "did you mean `sorting`"),
    (["data.task=null"], "data.files", "no prompts"),
    (["data.files={train: [x.jsonl]}"], "data.task", "one of the two"),
    (["reward.functions=null"], "reward.functions", ""),
    (["reward.functions={a: {type: maths}}"], "reward.functions.a.type", "did you mean `math`"),
    (
        ["reward.functions={a: {type: math, max_valu: 2.0}}"],
        "reward.functions.a.max_valu",
        "section `reward.functions.a` of type math has no key `max_valu`; did you mean `max_value`",
    ),
    (["reward.functions={a: {tpe: math}}"], "reward.functions.a.type", "known: code"),
    (["scratch_mib=3"], "scratch_mib", "has no key"),
    (["reward.deadline=0"], "reward.deadline", ""),
    (["weight_sync={type: patches}"], "weight_sync.type", "did you mean `patch`"),
    (["weight_sync={type: patch, in_place: true}"], "weight_sync.in_place", "nearest: false"),
    (
        ["cluster.residency={'rollout,actor': offload, actor: resident}"],
        "cluster.residency",
        "names actor 2 times; remove it",
    ),
    (
        ["weight_sync.type=reference", "cluster.runtime=ray"],
        "weight_sync.type",
        "nearest: shared_memory on one node",
    ),
    (
        [
            "weight_sync.type=shared_memory",
            "cluster.runtime=ray",
            "cluster.num_nodes=2",
            "cluster.cpu_devices_per_node=1",
            "cluster.component_placement={'reward,actor': 0, rollout: '0-1'}",
        ],
        "weight_sync.type",
        "a rollout process is on another; nearest: patch",
    ),
    (
        ["weight_sync={type: bucket, transport: nccl}", "cluster.runtime=ray"],
        "weight_sync.transport",
        "this run has none; leave it out",
    ),
    (
        ["weight_sync={type: bucket, transport: gloo}"],
        "weight_sync.transport",
        "nearest: scheduler, or cluster.runtime: ray",
    ),
    (["validation.samples=0"], "validation.samples", ""),
    (["runner.total_env_steps=5"], "runner.total_env_steps", ""),
    (["cluster.component_placement={rollout: 0, actor: 0}"], "component_placement", "reward"),
    (
        [
            "cluster.cpu_devices_per_node=2",
            "cluster.component_placement={'rollout,reward': '0', actor: '0-1'}",
        ],
        "component_placement",
        "cluster.runtime: ray",
    ),
    (
        [
            "rollout.prompts=3",
            "actor.n_minibatches=1",
            "cluster.cpu_devices_per_node=2",
            "cluster.component_placement={'rollout': '0-1', 'actor,reward': '0'}",
        ],
        "rollout.prompts",
        "nearest: 2, 4",
    ),
    (
        ["reward.functions.short={type: length, max_length: 12, cache_length: 8}"],
        "validation.correct_by",
        "the name of one, such as answer",
    ),
    (
        ["algorithm={type: dapo, safe_length: 12, max_length: 48}"],
        "algorithm.safe_length",
        "the longest that is sampled has 12 tokens; nearest: 11",
    ),
    (
        [
            "algorithm={type: dapo, safe_length: 8, max_length: 48}",
            "rollout.agent={tools: {calculator: {type: calculator}}, max_turns: 2, "
            "max_turn_tokens: 4}",
        ],
        "algorithm.safe_length",
        "the longest that is sampled has 8 tokens; nearest: 7",
    ),
    (
        [
            "reward.functions.short={type: length, max_length: 200, cache_length: 50}",
            "validation.correct_by=answer",
        ],
        "reward.functions.short.max_length",
        "is 150 tokens, from which on answers are penalised, and no answer is that long: the "
        "longest that is sampled has 12 tokens; nearest: 61",
    ),
    (["validation.correct_by=anwser"], "validation.correct_by", "there are answer"),
    (["validation.correct_from=5"], "validation.correct_from", "nearest: 0.5"),
    (
        ["reward.functions.answer.min_value=0.6"],
        "validation.correct_from",
        "answer gives 1 for a right answer and 0.6 for a wrong one; nearest: 0.8",
    ),
    (["reward.functions.answer.weight=0"], "functions.answer.weight", "nothing can be learnt"),
    # Python's clocks and lists end somewhere.
    (["cluster.timeout_minutes=1e30"], "cluster.timeout_minutes", "nearest: 10000000.0"),
    (["reward.deadline=1e30"], "reward.deadline", "must be <= 1000000000.0"),
    (["rollout.engine.process.step_deadline=1e30"], "step_deadline", "must be <= 1000000000.0"),
    (["rollout.partial.oversample=1e30"], "rollout.partial.oversample", "must be <= 1000.0"),
    (
        ["algorithm={type: ppo}", "critic={model: {path: x, lora: {rank: 4}}}"],
        "critic.model.lora",
        "trains all its weights",
    ),
]


def test_a_sum_of_functions_may_be_what_is_right(tmp_path: Path) -> None:
    short = "reward.functions.short={type: length, max_length: 12, cache_length: 8}"
    config = small_config(tmp_path, short, "validation.correct_from=0.9")
    assert (config.validation.correct_by, config.validation.correct_from) == (None, 0.9)


def test_the_value_of_a_single_function_decides_whatever_its_weight(tmp_path: Path) -> None:
    for weight, decides in ((1.0, None), (0.3, "answer")):
        config = small_config(tmp_path, f"reward.functions.answer.weight={weight}")
        assert config.validation.decides(config.reward) == decides


@pytest.mark.parametrize(("overrides", "key", "hint"), REFUSED)
def test_refused(tmp_path: Path, overrides: list[str], key: str, hint: str) -> None:
    with pytest.raises(UserError) as refused:
        small_config(tmp_path, *overrides)
    assert key in str(refused.value)
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("recipe", "section", "expected"),
    [
        ("reasoning/arithmetic_grpo", "actor", (1e-6, 1.0, 1e-5)),
        ("reasoning/arithmetic_grpo", "warm_start", (1e-3, 1.0, 1e-5)),
        ("reasoning/math_1.5b_ppo", "critic", (1e-5, 1.0, 1e-5)),
        ("sft/arithmetic", "actor", (1e-5, 1.0, 1e-5)),
        ("quickstart", "actor", (3e-4, 0.5, 1e-5)),
        ("embodied/drawer_close_sac", "actor", (3e-4, None, 1e-8)),
    ],
)
def test_one_key_of_an_optimizer_leaves_the_others_as_they_are_without_it(
    recipe: str, section: str, expected: tuple[float, ...]
) -> None:
    for words in ([], [f"{section}.optim.weight_decay=0.1"]):
        loaded = load_recipe(recipe, [f"~{section}.optim", *words])
        config: Any = validate(REGISTRY.load(loaded.data["task"]).config_class, loaded.data, loaded)
        optim = getattr(config, section).optim
        assert (optim.lr, optim.max_grad_norm, optim.eps) == expected


TWO = (
    "cluster={runtime: ray, cpu_devices_per_node: 2, "
    "component_placement: {'rollout,reward,%s': 0-1}}"
)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model={path: /nowhere/model}", "warm_start=null"], "model.path"),
        (["actor.tensor_parallel_size=2", TWO % "actor"], "the model's 1 heads"),
        (
            ["critic={tensor_parallel_size: 2}", "algorithm={type: ppo}", TWO % "actor,critic"],
            "2 does not divide the model's 1 heads of keys and values; nearest: 1",
        ),
        (
            ["reward.functions={a: {type: function, function: 'nomodule:f'}}",
             "validation.correct_by=a"],
            "nomodule",
        ),
    ],
)  # fmt: skip
def test_refused_on_this_machine(tmp_path: Path, overrides: list[str], key: str) -> None:
    config = small_config(tmp_path, *overrides)
    with pytest.raises(UserError) as refused:
        check(config, load_recipe(str(write_recipe(tmp_path)), overrides))
    assert key in str(refused.value)


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (model / name).write_text("{}")
    overrides = [
        "data={task: null, files: {train: [/nowhere/prompts.jsonl]}}",
        "warm_start=null",
        "validation.val_check_interval=0",
        f"model.path={model}",
        "model.architecture=null",
    ]
    config = small_config(tmp_path, *overrides)
    with pytest.raises(UserError, match=r"data\.files\.train"):
        check(config, load_recipe(str(write_recipe(tmp_path)), overrides))


def test_a_recipe_is_checked_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from rlinf.cli.main import main\n"
        f"code = main(['train', {str(write_recipe(tmp_path))!r}, 'rollout.group_size=1'])\n"
        "assert code == 2, code\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_validation_does_not_say_of_sampling_is_as_in_training(tmp_path: Path) -> None:
    training = ["rollout.sampling={max_new_tokens: 20, temperature: 0.7, stop_token_ids: [3]}"]
    config = small_config(tmp_path, *training, "validation.sampling.top_p=0.9")
    own = config.validation.sampling
    assert own is not None
    assert (own.max_new_tokens, own.temperature, own.top_p) == (20, 0.7, 0.9)
    assert own.stop_token_ids == (3,)
    config = small_config(tmp_path, *training, "validation.sampling={greedy: true}")
    own = config.validation.sampling
    assert own is not None
    assert (own.max_new_tokens, own.temperature, own.greedy) == (20, 1.0, True)
    assert small_config(tmp_path, *training).validation.sampling is None
    short = small_config(
        tmp_path, "rollout.sampling.min_new_tokens=3", "validation.sampling.max_new_tokens=2"
    )
    assert short.validation.sampling is not None
    assert short.validation.sampling.min_new_tokens == 2
    for wrong in ("typo=1", "temperature=-1"):
        with pytest.raises(UserError) as refused:
            small_config(tmp_path, f"rollout.sampling.{wrong}", "validation.sampling.top_k=3")
        assert "1 problem\n" in str(refused.value)


def of_a_large_model(*overrides: str) -> ReasoningConfig:
    recipe = load_recipe("reasoning/math_1.5b_grpo", overrides)
    return validate(ReasoningConfig, recipe.data, recipe)


@pytest.mark.parametrize(
    ("overrides", "key", "hint"),
    [
        (["rollout.sampling.top_k=5"], "rollout.sampling.top_k", "0, or log_probs: raw"),
        (["rollout.sampling.min_new_tokens=5"], "rollout.sampling.min_new_tokens", "nearest: 0"),
        (
            ["rollout.engine.log_probs=raw", "rollout.sampling.temperature=0.7"],
            "rollout.sampling.temperature",
            "nearest: 1.0, or log_probs: processed",
        ),
        (
            ["rollout.engine=null", "rollout.engine={type: sglang}", "actor.order=position",
             "rollout.sampling.repetition_penalty=1.1"],
            "rollout.sampling.repetition_penalty",
            "nearest: 1.0",
        ),
    ],
)  # fmt: skip
def test_sampling_that_an_engine_cannot_score_is_refused(
    overrides: list[str], key: str, hint: str
) -> None:
    with pytest.raises(UserError) as refused:
        of_a_large_model(*overrides)
    assert f"{key} = " in str(refused.value)
    assert hint in str(refused.value)


def test_validation_with_a_penalty_that_an_engine_computes_otherwise_is_refused() -> None:
    of_sglang = ("rollout.engine=null", "rollout.engine={type: sglang}", "actor.order=position")
    how = "validation.sampling={repetition_penalty: 1.1, max_new_tokens: 64}"
    with pytest.raises(UserError, match=r"validation\.sampling\.repetition_penalty = 1\.1.*prompt"):
        of_a_large_model(*of_sglang, "data.files.validation=[v.jsonl]", how)


def test_validation_may_filter_at_any_temperature() -> None:
    """Nobody uses its log-probs."""
    how = "validation.sampling={temperature: 0.6, top_p: 0.95, max_new_tokens: 64}"
    config = of_a_large_model(how)
    assert config.validation.sampling.top_p == 0.95


def test_the_engine_of_an_evaluation_loads_the_weights_that_training_would_send() -> None:
    config = of_a_large_model("rollout.engine.load_format=dummy", "rollout.engine.max_model_len=9")
    evaluated = Reasoning.for_evaluation(config).rollout.engine
    expected = config.rollout.engine.model_copy(update={"load_format": "auto"})
    assert evaluated == expected


@pytest.mark.parametrize(
    ("overrides", "forced"),
    [
        (["rollout.engine.log_probs=raw"], ["rollout.sampling.min_new_tokens=27648"]),
        ([], ["rollout.sampling.stop_token_ids=[]", "rollout.sampling.stop=[]"]),
    ],
)
def test_the_longest_answers_are_asked_for_as_the_engine_allows(
    overrides: list[str], forced: list[str]
) -> None:
    config = of_a_large_model(*overrides)
    found = list(config.planning.worst_case)
    assert found == ["runner.total_steps=1", *forced]
    worst = of_a_large_model(*overrides, *found)
    assert worst.rollout.engine.unscored(worst.rollout.sampling) is None
