"""What other projects call our keys, for errors that answer the name that a user knows.

Names of the arguments and configurations of Stable-Baselines3, CleanRL, TRL, verl, lerobot, openpi
and RLinf.
"""

from __future__ import annotations

_NAMES = {
    "actor.optim": "optimizer",
    "actor.optim.lr": "learning_rate actor_lr policy_lr optimizer_lr peak_lr max_lr",
    "actor.optim.beta1": "adam_beta1",
    "actor.optim.beta2": "adam_beta2",
    "actor.optim.eps": "adam_eps adam_epsilon",
    "critic.optim.lr": "critic_lr max_lr",
    "critic.lr_sched.final_fraction": "min_lr",
    "actor.critic_optim": "actor.critic_optim",  # of another task
    "actor.critic_optim.lr": "critic_lr q_lr",
    "actor.optim.value_lr": "critic_lr",
    "actor.optim.max_grad_norm": "grad_clip grad_clip_norm clip_grad clip_gradient_norm "
    "optimizer_grad_clip_norm",
    "actor.lr_sched": "lr_scheduler lr_scheduler_type scheduler lr_schedule anneal_lr",
    "actor.lr_sched.type": "lr_decay_style",
    "actor.lr_sched.final_fraction": "min_lr",
    "actor.lr_sched.warmup_steps": "lr_warmup_steps scheduler_warmup_steps num_warmup_steps",
    "actor.n_minibatches": "ppo_mini_batch_size num_minibatches global_batch_size",
    "actor.global_batch_size": "batch_size ppo_mini_batch_size mini_batch_size minibatch_size "
    "num_minibatches",
    "actor.micro_batch_size": "per_device_train_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu micro_batch_size_per_gpu training_batch_size_per_gpu",
    "actor.type": "training_backend",
    "actor.max_tokens_per_micro_batch": "ppo_max_token_len_per_gpu max_tokens_per_mbs",
    "actor.update_epoch": "n_epochs ppo_epochs num_iterations num_ppo_epochs update_epochs",
    "actor.gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing",
    "algorithm.type": "adv_estimator adv_type loss_type importance_sampling_level scale_rewards",
    "algorithm.importance_sampling": "importance_sampling_fix",
    "algorithm.importance_sampling_clip": "tis_imp_ratio_cap vllm_importance_sampling_cap",
    "algorithm.clip_ratio_low": "clip_range cliprange clip_ratio clip_coef epsilon epsilon_low "
    "ratio_clip_eps",
    "algorithm.clip_ratio_high": "clip_range cliprange clip_ratio clip_coef epsilon_high "
    "ratio_clip_eps",
    "algorithm.value_clip": "clip_range_vf cliprange_value value_cliprange",
    "algorithm.entropy_bonus": "ent_coef entropy_coeff entropy_coef",
    "algorithm.initial_temperature": "ent_coef temperature_init initial_alpha "
    "algorithm.entropy_tuning",
    "algorithm.learn_temperature": "alpha_type algorithm.entropy_tuning",
    "algorithm.target_entropy": "algorithm.entropy_tuning",
    "actor.temperature_optim": "algorithm.entropy_tuning",
    "algorithm.value_coefficient": "vf_coef value_loss_coef",
    "algorithm.gae_lambda": "lam lambda",
    "algorithm.normalize_advantages": "normalize_advantage adv_norm norm_adv",
    "algorithm.normalize_rewards": "norm_reward",
    "model.normalize_observations": "norm_obs",
    "model.observation_clip": "clip_obs",
    "algorithm.kl_beta": "beta kl_coef kl_loss_coef use_kl_loss",
    "algorithm.group_baseline": "use_reinpp_baseline",
    "algorithm.kl_reward_beta": "use_kl_in_reward reinpp_kl_beta",
    "algorithm.overlong_filter": "mask_truncated_completions",
    "reward.functions": "custom_reward_function custom_reward_function.path reward_funcs "
    "reward.reward_scale reward.reward_type",
    "reward.functions.weight": "reward_weights",
    "cluster.component_placement": "n_gpus_per_node",
    "algorithm.proximal": "recompute_logprobs",
    "cluster.num_nodes": "nnodes",
    "cluster.residency": "enable_offload offload_optimizer offload_weight",
    "algorithm.update_to_data": "utd_ratio gradient_steps update_epoch",
    "algorithm.critic_warmup_steps": "optim.critic_warmup_steps",
    "algorithm.loss_agg_func": "loss_agg_mode use_valid_token_scale",
    "checkpoint.interval": "save_freq save_steps save_interval checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit max_ckpt_to_keep max_actor_ckpt_to_keep",
    "data": "dataset",
    "data.chat_template": "custom_chat_template chat_template_path",
    "data.chat_template_kwargs": "apply_chat_template_kwargs",
    "data.path": "repo_id dataset_name dataset_path",
    "data.files.train": "train_files train_data_paths",
    "data.files.validation": "val_files val_data_paths",
    "env.num_envs": "n_envs total_num_envs num_group_envs",
    "env.train.max_episode_steps": "max_episode_length",
    "env.train.options.suite": "task_suite_name",
    "env.train.reward_scale": "reward_coef",
    "env.train.step_penalty": "use_step_penalty",
    "env.train.options.tasks": "task_id_filter",
    "env.train.type": "env_id env_type simulator_type",
    "evaluation": "eval env.eval",
    "evaluation.episodes": "n_eval_episodes n_episodes",
    "evaluation.interval": "eval_freq eval_steps test_freq val_check_interval",
    "validation.val_check_interval": "eval_steps test_freq",
    "validation.interval": "eval_steps",
    "logger": "runner.logger",
    "logger.backends": "report_to logger_backends trainer.logger wandb",
    "model": "policy actor.model rollout.model",
    "model.activation": "activation_fn",
    "model.denoising_steps": "num_steps num_inference_steps num_denoising_steps",
    "model.hidden_sizes": "net_arch",
    "model.type": "policy.type",
    "env.train.observation_steps": "n_obs_steps",
    "data.augmentation": "image_transforms",
    "model.horizon": "action_horizon chunk_size",
    "model.initial_log_std": "log_std_init",
    "actor.lora": "peft peft_config",
    "actor.lora.rank": "lora_rank lora_r lora.r peft.r",
    "actor.lora.alpha": "lora_alpha",
    "model.num_action_chunks": "n_action_steps",
    "model.path": "model_name_or_path pretrained_path model_path",
    "actor.precision": "bf16 fp16",
    "model.tokenizer": "tokenizer_name tokenizer_path",
    "replay": "replay_buffer algorithm.replay_buffer",
    "replay.capacity": "buffer_size buffer_capacity",
    "replay.start_steps": "learning_starts",
    "rollout.group_size": "num_generations n n_samples_per_prompt",
    "rollout.max_staleness": "staleness_threshold",
    "rollout.prompts": "train_batch_size gen_batch_size rollout_batch_size",
    "rollout.engine": "vllm use_vllm rollout_backend",
    "rollout.engine.type": "rollout.name",
    "rollout.engine.tensor_parallel_size": "rollout.tensor_parallel_size",
    "rollout.engine.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.sampling": "sampling_params algorithm.sampling_params",
    "rollout.sampling.max_new_tokens": "max_completion_length max_response_length response_length "
    "seq_length",
    "rollout.steps": "n_steps num_steps train_freq rollout_epoch max_steps_per_rollout_epoch",
    "data.max_length": "seq_length",
    "data.max_prompt_length": "prompt_length",
    "runner": "trainer",
    "runner.output_dir": "default_local_dir log_path tensorboard_log",
    "task": "task_type",
    "runner.total_env_steps": "total_timesteps n_timesteps max_epochs max_steps",
    "runner.total_steps": "steps max_steps total_training_steps max_epochs total_epochs "
    "num_train_steps num_train_epochs",
}
"""Our keys, and what others call what they hold; with its section where it says little alone."""


_OTHER_VALUES = {
    "critic_warmup_steps": {
        "critic_warmup_steps": "optimizer steps / the updates per step that --dry-run shows"
    },
    "final_fraction": {"min_lr": "min_lr / lr"},
    "functions": {"reward_scale": "`NAME.scale` of each", "reward_type": "`NAME.type` of each"},
    "learn_temperature": {"alpha_type": "false for fixed_alpha"},
    "loss_agg_func": {
        "use_valid_token_scale": "token-mean where it is true; where it is false and a micro batch "
        "has one answer, seq-mean-token-mean"
    },
    "max_new_tokens": {"seq_length": "seq_length - `data.max_prompt_length`"},
    "replay": {"replay_buffer": "in transitions and environment steps, not in trajectories"},
    "step_penalty": {"use_step_penalty": "1 where it is true"},
    "steps": dict.fromkeys(
        ("rollout_epoch", "max_steps_per_rollout_epoch"),
        "rollout_epoch × max_steps_per_rollout_epoch",
    ),
    "total_env_steps": {
        "max_epochs": "max_epochs × `env.num_envs` × `rollout.steps`",
        "max_steps": "max_steps × `env.num_envs` × `rollout.steps`",
    },
    "total_steps": {
        name: f"not passes over the data; {name} × prompts / `rollout.prompts`, or × examples / "
        "`actor.global_batch_size`"
        for name in ("max_epochs", "total_epochs", "num_train_epochs")
    },
    "update_to_data": {
        "update_epoch": "update_epoch / transitions of a rollout, which --dry-run shows"
    },
}
"""By the last name of our key, and what others call it: how our value follows from theirs."""

_GROUPS_SHARE = (
    "groups share their start states here, by `env.train.group_size`, and training draws these; "
    "leave it out"
)
_NOT_HERE = dict.fromkeys(
    ("use_fixed_reset_state_ids", "use_ordered_reset_state_ids"), _GROUPS_SHARE
)
"""Names elsewhere that no key of ours stands for, though one may look alike, and why none does."""


def names_here(name: str, section: str = "") -> list[str]:
    """Return the keys that hold what others call ``name``, in a section of theirs if one is given;
    a run may have none of them."""
    called = {name, f"{section}.{name}"}
    return [key for key, names in _NAMES.items() if called & {*names.split()}]


def names_in_section(name: str, section: str) -> list[str]:
    """Return the keys that hold what others call ``name`` in a ``section`` of theirs alone."""
    return [key for key, names in _NAMES.items() if f"{section}.{name}" in names.split()]


def as_written_here(key: str, name: str) -> str:
    """Return a key of ours as a message names it; with how its value follows from that of others'
    ``name``, where it is not the same."""
    other_value = _OTHER_VALUES.get(key.rpartition(".")[2], {}).get(name)
    return f"`{key}`: {other_value}" if other_value else f"`{key}`"


def not_here(name: str) -> str:
    """Return why no key of ours stands for others' ``name``; empty where nothing is known."""
    return _NOT_HERE.get(name, "")


_SAC = "`off_policy` for SAC"
_TASKS = {
    **dict.fromkeys(("embodied", "embodied_eval"), f"`embodied`, or {_SAC}"),
    **dict.fromkeys(("reasoning", "reasoning_eval", "coding_online_rl"), "`reasoning`"),
    "offline": "`behaviour_cloning`; none learns by reinforcement from recorded episodes alone",
    "sft": "`sft`, or `behaviour_cloning` for policies of robots",
}
"""What RLinf calls a task by `runner.task_type`, and the nearest `task` of ours."""


def task_here(task_type: object) -> str:
    """Return which ``task`` of ours is nearest to a ``task_type``; empty where none is known."""
    return _TASKS.get(task_type, "") if isinstance(task_type, str) else ""
