"""Names that other projects have for our keys."""

from __future__ import annotations

import pytest

from rlinf.cli.tasks import read_config, task_names
from rlinf.config.explain import explain
from rlinf.config.load import load_recipe
from rlinf.config.names_elsewhere import _NAMES, names_here
from rlinf.config.schema import walk
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.runners.task import REGISTRY


def test_each_of_our_keys_exists_and_none_is_taken_for_anothers() -> None:
    keys = {key for name in task_names() for key, *_ in walk(REGISTRY.load(name).config_class)}
    assert set(_NAMES) <= keys
    for key, names in _NAMES.items():  # no section has both
        section = key.rpartition(".")[0]
        assert not {f"{section}.{name}".lstrip(".") for name in names.split()} & keys - {
            "algorithm.beta",  # of another algorithm
            "actor.global_batch_size",  # of another task
        }


@pytest.mark.parametrize(
    ("recipe", "override", "hint"),
    [
        ("quickstart", "learning_rate=1", "no key `learning_rate`; here that is `actor.optim.lr`"),
        ("quickstart", "env.n_envs=8", "no key `n_envs`; here that is `env.num_envs`"),
        ("quickstart", "clip_range=0.1",
         "here that is `algorithm.clip_ratio_low`, `algorithm.clip_ratio_high`"),
        ("quickstart", "algorithm.ent_coef=0", "here that is `algorithm.entropy_bonus`"),
        ("embodied/drawer_close_sac", "ent_coef=1", "here that is `algorithm.initial_temperature`"),
        ("quickstart", "num_steps=8", "here that is `rollout.steps`"),
        ("vla/drawer_close_pi05_ppo", "model.num_steps=8", "here that is `model.denoising_steps`"),
        ("quickstart", "trainer.save_freq=5", "here that is `checkpoint.interval`"),
        ("quickstart", "trainer={}", "here that is `runner`"),
        ("reasoning/arithmetic_grpo", "actor.global_batch_size=64", "is `actor.n_minibatches`"),
        ("reasoning/arithmetic_grpo", "actor_rollout_ref.rollout.n=8", "is `rollout.group_size`"),
        ("reasoning/arithmetic_grpo", "rollout.name=vllm", "here that is `rollout.engine.type`"),
        ("reasoning/arithmetic_grpo", "actor_rollout_ref.rollout.name=vllm",
         "here that is `rollout.engine.type`"),
        ("reasoning/arithmetic_grpo", "lora_r=8", "here that is `actor.lora.rank`"),
        ("reasoning/arithmetic_grpo", "rollout.n=8", "here that is `rollout.group_size`"),
        ("reasoning/arithmetic_grpo", "beta=0", "here that is `algorithm.kl_beta`"),
        ("quickstart", "beta=0", "the config has no key `beta`; here that is `algorithm.kl_beta`"),
        ("reasoning/arithmetic_grpo", "algorithm.importance_sampling_fix=true",
         "here that is `algorithm.importance_sampling`"),
        ("reasoning/arithmetic_grpo", "rollout.enable_offload=true",
         "here that is `cluster.residency`"),
        ("quickstart", "algorithm.staleness_threshold=1", "here that is `rollout.max_staleness`"),
        ("quickstart", "actor.training_backend=fsdp", "here that is `actor.type`"),
        ("quickstart", "runner.task_type=embodied", "here that is `task`"),
        ("quickstart", "env.train.use_fixed_reset_state_ids=true",
         "groups share their start states here, by `env.train.group_size`"),
        ("embodied/two_simulators_ppo", "env.train.1.use_ordered_reset_state_ids=true",
         "and training draws these; leave it out"),
        ("quickstart", "env.train.rollout_epoch=8",
         "here that is `rollout.steps`: rollout_epoch × max_steps_per_rollout_epoch"),
        ("quickstart", "env.train.use_step_penalty=true",
         "here that is `env.train.step_penalty`: 1 where it is true"),
        ("quickstart", "env.train.reward_coef=5", "here that is `env.train.reward_scale`"),
        ("quickstart", "env.train.max_steps_per_rollout_epoch=80",
         "here that is `rollout.steps`: rollout_epoch × max_steps_per_rollout_epoch"),
        ("quickstart", "runner.max_epochs=9",
         "is `runner.total_env_steps`: max_epochs × `env.num_envs` × `rollout.steps`"),
        ("embodied/drawer_close_sac", "runner.max_epochs=9",
         "is `runner.total_env_steps`: max_epochs × `env.num_envs` × `rollout.steps`"),
        ("reasoning/arithmetic_grpo", "trainer.total_epochs=9",
         "is `runner.total_steps`: not passes over the data; total_epochs × prompts"),
        ("embodied/drawer_close_sac", "algorithm.update_epoch=32",
         "is `algorithm.update_to_data`: update_epoch / transitions of a rollout"),
        ("quickstart", "actor.optim.critic_warmup_steps=9",
         "is `algorithm.critic_warmup_steps`: optimizer steps / the updates per step"),
        ("embodied/drawer_close_sac", "actor.critic_optim.clip_grad=1",
         "here that is `actor.critic_optim.max_grad_norm`"),
        ("reasoning/math_1.5b_ppo", "critic.optim.learning_rate=1", "is `critic.optim.lr`"),
        ("embodied/two_simulators_ppo", "env.train.1.env_type=x", "is `env.train.1.type`"),
        ("quickstart", "checkpoint.eval_freq=9", "here that is `evaluation.interval`"),
        ("quickstart", "actor.model={is_lora: true, lora_rank: 32}", "here that is `model`"),
        ("quickstart", "actor.model.model_path=x", "here that is `model.path`"),
        ("reasoning/arithmetic_grpo", "rollout.model={model_path: x, n: 8}", "that is `model`"),
        ("quickstart", "env.eval={env_type: x, total_num_envs: 8}", "here that is `evaluation`"),
        ("quickstart", "runner.logger={log_path: x, project_name: y}", "here that is `logger`"),
        ("quickstart", "algorithm.optim={learning_rate: 1, b: 2}", "did you mean `actor.optim`?"),
        ("quickstart", "actor.critic_optim={lr: 1, clip_grad: 1}", "no key `critic_optim`; known"),
        ("reasoning/arithmetic_grpo", "reward.reward_scale=5",
         "here that is `reward.functions`: `NAME.scale` of each"),
        ("reasoning/arithmetic_grpo", "reward.reward_type=math",
         "here that is `reward.functions`: `NAME.type` of each"),
        ("reasoning/math_1.5b_ppo", "rollout.tensor_parallel_size=2",
         "here that is `rollout.engine.tensor_parallel_size`"),
        ("quickstart", "actor.optim.adam_eps=1", "here that is `actor.optim.eps`"),
        ("embodied/drawer_close_sac", "actor.critic_optim.adam_eps=1",
         "here that is `actor.critic_optim.eps`"),
        ("reasoning/math_1.5b_ppo", "critic.lr_sched.lr_decay_style=linear",
         "here that is `critic.lr_sched.type`"),
        ("reasoning/math_1.5b_ppo", "critic.lr_sched.max_lr=1", "that is `critic.optim.lr`"),
        ("reasoning/math_1.5b_ppo", "actor.lr_sched.max_lr=1", "that is `actor.optim.lr`"),
        ("reasoning/math_1.5b_ppo", "actor.optim.min_lr=1",
         "here that is `actor.lr_sched.final_fraction`: min_lr / lr"),
        ("reasoning/arithmetic_grpo", "algorithm.ratio_clip_eps=1",
         "here that is `algorithm.clip_ratio_low`, `algorithm.clip_ratio_high`"),
        ("reasoning/math_1.5b_ppo", "algorithm.value_cliprange=1", "is `algorithm.value_clip`"),
        ("reasoning/math_1.5b_reinforce_pp", "algorithm.use_reinpp_baseline=true",
         "here that is `algorithm.group_baseline`"),
        ("reasoning/arithmetic_grpo", "algorithm.use_valid_token_scale=true",
         "here that is `algorithm.loss_agg_func`: token-mean where it is true"),
        ("reasoning/arithmetic_grpo", "algorithm.reinpp_kl_beta=1",
         "here that is `algorithm.kl_reward_beta`"),
        ("reasoning/arithmetic_grpo", "algorithm.sampling_params={do_sample: true, top_p: 1}",
         "here that is `rollout.sampling`"),
        ("embodied/drawer_close_sac",
         "algorithm.entropy_tuning={alpha_type: exp, optim: {lr: 1, clip_grad: 9}}",
         "here that is `algorithm.initial_temperature`, `algorithm.learn_temperature`, "
         "`algorithm.target_entropy`, `actor.temperature_optim`"),
        ("embodied/drawer_close_sac", "algorithm.entropy_tuning.initial_alpha=1",
         "here that is `algorithm.initial_temperature`"),
        ("embodied/drawer_close_sac", "algorithm.replay_buffer={cache_size: 9, auto_save: false}",
         "here that is `replay`: in transitions and environment steps, not in trajectories"),
        ("vla/libero_spatial_ppo_pi05", "env.train.task_suite_name=libero_10",
         "here that is `env.train.options.suite`"),
        ("vla/libero_spatial_ppo_pi05", "env.train.task_id_filter=[0]",
         "here that is `env.train.options.tasks`"),
        ("reasoning/arithmetic_grpo", "runner.seq_length=9",
         "is `rollout.sampling.max_new_tokens`: seq_length - `data.max_prompt_length`"),
        ("sft/arithmetic", "runner.seq_length=9", "here that is `data.max_length`"),
        ("reasoning/math_1.5b_ppo", "runner.max_tokens_per_mbs=9",
         "here that is `actor.max_tokens_per_micro_batch`"),
        ("quickstart", "num_generations=8", "no key `num_generations`; did you mean"),
    ],
)  # fmt: skip
def test_an_error_says_what_a_name_is_here(recipe: str, override: str, hint: str) -> None:
    found = load_recipe(recipe, [override])
    with pytest.raises(ConfigError, match="1 problem") as caught:
        validate(REGISTRY.load(found.data["task"]).config_class, found.data, found)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("buffer_size=5", "elsewhere that is `replay.capacity` (task off_policy); known: actor,"),
        ("replay.capacity=5", "elsewhere that is `replay` (task off_policy); known"),
        ("algorithm.tau=0.1", "elsewhere that is `algorithm.tau` (type dsrl, nft, sac); known"),
        ("actor.critic_optim={lr: 1, clip_grad: 1}",
         "elsewhere that is `actor.critic_optim` (task off_policy); known"),
        ("rollout.tensor_parallel_size=2",
         "elsewhere that is `rollout.engine.tensor_parallel_size` (type sglang, vllm); known"),
        ("env.train.task_suite_name=libero_10",
         "elsewhere that is `env.train.options.suite` (type libero); known"),
        ("algorithm.use_reinpp_baseline=true",
         "elsewhere that is `algorithm.group_baseline` (type reinforce_pp); known"),
        ("model.activatoin=relu", "has no key `activatoin`; did you mean `activation`?"),
        ("what=1", "the config has no key `what`; known: actor,"),
    ],
)  # fmt: skip
def test_an_error_says_which_other_recipes_have_a_key(override: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="1 problem") as caught:
        read_config("embodied/pendulum_ppo", [override])
    assert hint in str(caught.value)


def test_explain_too() -> None:
    config = REGISTRY.load("embodied").config_class
    with pytest.raises(ConfigError, match=r"no key `n_steps`; here that is `rollout.steps`"):
        explain(config, "n_steps")
    with pytest.raises(ConfigError, match=r"no key `rollout_epoch`; .*`: rollout_epoch × max"):
        explain(config, "rollout_epoch")
    with pytest.raises(ConfigError, match=r"no key `use_fixed_reset_state_ids`; groups share"):
        explain(config, "use_fixed_reset_state_ids")


def test_a_name_that_nobody_has() -> None:
    assert names_here("gae_lamda") == []
