"""What `modes.py` runs: three workloads, each under every placement of two slots."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

SLOTS = 2
SLOTS_KEY = "cluster.cpu_devices_per_node"
SEQUENTIAL = "sequential"
AUTO = "auto"
AHEAD = {"rollout.max_staleness": 1}

MLP: dict[str, Any] = {
    "base": "quickstart",
    "runner": {"total_env_steps": 10**9},
    "evaluation": {"interval": 0, "episodes": 4, "num_envs": 4, "video_episodes": 0},
    "without": ["evaluation.stop_at_success"],
}


@dataclass(frozen=True)
class Workload:
    """What is run, and the modes it is run in: overrides by name, those of `auto` last."""

    recipe: dict[str, Any]
    modes: dict[str, dict[str, Any]]


def placed(placement: dict[str, str], **overrides: Any) -> dict[str, Any]:
    """Overrides of a placement on the two slots."""
    return {
        SLOTS_KEY: SLOTS,
        "cluster.component_placement": placement,
        **overrides,
    }


def embodied_modes(block: int) -> dict[str, dict[str, Any]]:
    """Placements of env, policy and trainer; blocks of one size make them equal to the bit."""
    exact = {"rollout.block_size": block}
    apart = {"env": "0", "rollout,actor": "1"}
    both = {"env": "0", "rollout": "1", "actor": "0-1"}
    same, one = {"env,rollout,actor": "0-1"}, {"env,rollout,actor": "0"}
    trainer = {"env,rollout": "0", "actor": "1"}
    two = {"rollout.pipeline_stage_num": 2}
    return {
        SEQUENTIAL: placed(one, **exact),
        "disaggregated": placed(apart, **exact),
        "disaggregated, 2 stages": placed(apart, **exact, **two),
        "hybrid": placed(both, **exact),
        "hybrid, 2 stages": placed(both, **exact, **two),
        "collocated": placed(same, **exact),
        "collocated, 2 stages": placed(same, **exact, **two),
        "trainer apart": placed(trainer, **exact),
        "trainer apart, staleness 1": placed(trainer, **exact, **AHEAD),
        AUTO: {SLOTS_KEY: SLOTS, **exact, "cluster.plan": "auto"},
    }


def rendering() -> Workload:
    """A rendering simulator and a policy of comparable cost."""
    recipe = MLP | {
        "env": {
            "num_envs": 8,
            "train": {
                "type": "metaworld",
                "options": {"task": "window-open-v3", "images": True, "image_size": 64},
            },
        },
        "rollout": {"steps": 16},
        "model": {
            "type": "cnn",
            # On one slot the pictures of a step take it as long as rendering them takes.
            "channels": [224, 416, 416],
            "kernel_sizes": [8, 4, 3],
            "strides": [4, 2, 1],
            "hidden_sizes": [64],
        },
        "actor": {"global_batch_size": 64, "micro_batch_size": 8, "update_epoch": 1},
        "without": [*MLP["without"], "model.hidden_sizes"],
    }
    return Workload(recipe, embodied_modes(block=2))


def chunks() -> Workload:
    """A policy that decides rarely: the simulator takes almost all the time.

    Beginning episodes takes as long as many of their steps. All environments do it once in each
    training step, so that training steps are alike.
    """
    recipe = MLP | {
        "env": {"num_envs": 16, "train": {"max_episode_steps": 128}},
        "rollout": {"steps": 128},
        "model": {"num_action_chunks": 8},
        "actor": {"global_batch_size": 64, "micro_batch_size": 16, "update_epoch": 4},
    }
    return Workload(recipe, embodied_modes(block=4))


def reasoning() -> Workload:
    """Random weights end a completion at each token with the same small probability."""
    recipe = {
        "base": "reasoning/arithmetic_grpo",
        "runner": {"total_steps": 1000},
        "data": {"max_prompt_length": 64},
        "model": {"architecture": {"max_position_embeddings": 512}},
        "rollout": {
            "prompts": 16,
            "group_size": 8,
            "sampling": {"max_new_tokens": 256},
            "engine": {"deterministic": True},
        },
        "reward": {
            "functions": {"answer": {"type": "length", "max_length": 256, "cache_length": 200}}
        },
        "actor": {"n_minibatches": 4, "optim": {"lr": 1e-6}},
        "validation": {"prompts": 2, "val_check_interval": 0},
        "without": ["warm_start"],
    }
    apart = {"rollout,reward": "0", "actor": "1"}
    same = {"rollout,reward,actor": "0-1"}
    one = {"rollout,reward,actor": "0"}
    return Workload(
        recipe,
        {
            SEQUENTIAL: placed(one),
            "disaggregated": placed(apart),
            "hybrid": placed({"rollout,reward": "0-1", "actor": "1"}),
            "collocated": placed(same, **{"cluster.runtime": "ray"}),
            "disaggregated, staleness 1": placed(apart, **AHEAD),
            # Two ranks of a language trainer need it.
            AUTO: {SLOTS_KEY: SLOTS, "cluster.runtime": "ray", "cluster.plan": "auto"},
        },
    )


def small(workload: Workload) -> Workload:
    """The same modes with so little work that steps say nothing about speed."""
    recipe = copy.deepcopy(workload.recipe)
    if "env" in recipe:
        recipe["rollout"]["steps"] = 16
        recipe["env"]["train"]["max_episode_steps"] = 16
        recipe["actor"] |= {"global_batch_size": 16, "micro_batch_size": 4}
        if "channels" in recipe["model"]:
            recipe["model"]["channels"] = [8, 8, 8]
    else:
        recipe["rollout"] |= {"prompts": 4, "group_size": 2, "sampling": {"max_new_tokens": 8}}
        recipe["reward"]["functions"]["answer"] |= {"max_length": 8, "cache_length": 4}
        recipe["actor"]["n_minibatches"] = 2
    return Workload(recipe, workload.modes)


WORKLOADS = {"rendering": rendering, "chunks": chunks, "reasoning": reasoning}
