"""Runs a function of this module in two or four processes that train together."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlinf.trainers.language_trainers import save_pretrained
from rlinf.trainers.ranks import Ranks
from tests.trainers.language_models import (
    algorithm,
    log_probs_and_entropy,
    model,
    random_batch,
    trainer,
)
from tests.trainers.processes import results_of

STEPS = 2


def run(function: Callable[[Ranks, Path], Any], directory: Path, *, count: int = 2) -> list[Any]:
    """What ``function`` returns in each of the processes."""

    def arguments(rank: int) -> tuple[object, ...]:
        return function.__name__, rank, count, directory

    return results_of(__name__, arguments, seconds=480, count=count)


def rollout(name: str = "grpo", *, on_policy: Any = None) -> Any:
    """A prepared batch of an odd number of sequences."""
    batch = random_batch(13, group_size=4)
    if on_policy is not None:
        log_probs = on_policy.log_probs(batch)
        batch = replace(batch, log_probs=log_probs, version=0)
    return algorithm(name).prepare(batch)[0]


def observe(one: Any) -> dict[str, Any]:
    """Log-probs, two training phases, and the weights after them."""
    batch = random_batch(13, group_size=4)
    log_probs, entropy = log_probs_and_entropy(one, batch)
    prepared = rollout(on_policy=one)
    gradients = record_gradients(one)
    metrics = [one.train(prepared, step) for step in range(STEPS)]
    found = {
        "log_probs": log_probs,
        "entropy": entropy,
        "metrics": metrics,
        "gradients": gradients[0],
        "weights": {name: tensor.clone() for name, tensor in one.weights()},
        "reference": one.reference_log_probs(batch),
    }
    # The weights that were given away are not what the next phase computes with.
    metrics.append(one.train(prepared, STEPS))
    return found


def record_gradients(one: Any) -> list[dict[str, torch.Tensor]]:
    """A list that gets the whole gradients of each update, before they are clipped."""
    trained, found = one.modules.held["policy"], []
    apply = trained.apply_step

    def recording(**options: Any) -> None:
        found.append(trained.gather(trained.gradients(), keep=True, copy=True))
        apply(**options)

    trained.apply_step = recording
    return found


CASES: dict[str, dict[str, Any]] = {
    "data": {"n_minibatches": 2, "max_tokens_per_micro_batch": 25},
    "data, sequences": {
        "micro_batch_size": 3,
        "balance": False,
        "packing": False,
        "reshard": "after_forward",
    },
    "data, layers kept": {"micro_batch_size": 2, "reshard": "after_update"},
    "data, checkpointing": {"gradient_checkpointing": True, "micro_batch_size": 1},
    "data, bfloat16": {"precision": {"param": "bfloat16"}, "n_minibatches": 2},
    "data, bfloat16, little memory": {
        "precision": {"param": "bfloat16"},
        "micro_batch_size": 4,
        "reshard": "after_forward",
    },
    "data, adapter": {"lora": {"rank": 4}},
    "tensor": {"tensor_parallel_size": 2, "n_minibatches": 2},
}
MODELS: dict[str, list[tuple[str, bool]]] = {
    "data": [("qwen2", True), ("qwen2", False), ("deepseek_v3", False)],
    "tensor": [("qwen2", True), ("qwen2", False), ("qwen3", True)],
}
GRID: dict[str, dict[str, Any]] = {
    "grid": {"tensor_parallel_size": 2, "n_minibatches": 2},
    "grid, bfloat16": {"tensor_parallel_size": 2, "precision": {"param": "bfloat16"}},
    "grid, little memory": {
        "tensor_parallel_size": 2,
        "micro_batch_size": 2,
        "reshard": "after_forward",
        "gradient_checkpointing": True,
    },
}
"""On 2 data ranks × 2 tensor ranks."""
MODELS["grid"] = MODELS["tensor"]
REFERENCE = {"kl_beta": 0.1}


def compare(ranks: Ranks, directory: Path) -> dict[str, Any]:
    """All cases; state and sharded state of each."""
    results: dict[str, Any] = {}
    for case, config in (CASES if ranks.world_size == 2 else GRID).items():
        for family, tied in MODELS.get(case, [("qwen2", True)]):
            key = f"{case}, {family}, {'tied' if tied else 'untied'}"
            one = trainer(
                model(family, tied=tied), name="grpo", keys=REFERENCE, ranks=ranks, **config
            )
            results[key] = observe(one)
            results[key]["state"] = one.state_dict()
            one.save_sharded(directory / f"sharded-{key}")
            save_pretrained(one, directory / f"model-{key}")
            one.offload()
            one.onload()
    return results


def resume(ranks: Ranks, directory: Path) -> dict[str, Any]:
    """Load what one process saved, whole and sharded; give it back, and train on."""
    results: dict[str, Any] = {}
    configs = {"grid": GRID["grid"]} if ranks.world_size == 4 else CASES
    for case in [name for name in ("data", "tensor", "grid") if name in configs]:
        for kind in ("whole", "sharded"):
            one = trainer(model(seed=5), keys=REFERENCE, ranks=ranks, **configs[case])
            if kind == "whole":
                one.load_state_dict(torch.load(directory / "state.pt"))
            else:
                one.load_sharded(directory / "sharded")
            state = deepcopy(one.state_dict())
            results[f"{case}, {kind}"] = {"state": state, "more": one.train(rollout(), 2)}
    return results


if __name__ == "__main__":
    name, rank, count, folder = sys.argv[1:]
    store = torch.distributed.FileStore(f"{folder}/meet-{name}", int(count))
    world = Ranks(int(rank), int(count), store=store, timeout_s=120)
    outcome = globals()[name](world, Path(folder))
    world.close()
    sys.stdout.buffer.write(pickle.dumps(outcome))
