"""Runs a function of this module in two processes that train together."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlinf.trainers.language.parallel import Ranks
from tests.trainers.language.models import algorithm, model, random_batch, trainer
from tests.trainers.language.processes import results_of_two

STEPS = 2


def run(function: Callable[[Ranks, Path], Any], directory: Path) -> list[Any]:
    """What ``function`` returns in each of two processes."""
    return results_of_two(__name__, lambda rank: (function.__name__, rank, directory), seconds=240)


def rollout(name: str = "grpo", *, on_policy: Any = None) -> Any:
    """A prepared batch of an odd number of sequences."""
    batch = random_batch(13, group_size=4)
    if on_policy is not None:
        log_probs = on_policy.log_probs(batch)
        batch = replace(batch, rollout_log_probs=log_probs, version=0)
    return algorithm(name).prepare(batch)[0]


def observe(one: Any) -> dict[str, Any]:
    """Log-probs, two training phases, and the weights after them."""
    batch = random_batch(13, group_size=4)
    log_probs, entropy = one.log_probs_and_entropy(batch)
    prepared = rollout(on_policy=one)
    metrics = [one.train(prepared, step) for step in range(STEPS)]
    found = {
        "log_probs": log_probs,
        "entropy": entropy,
        "metrics": metrics,
        "weights": {name: tensor.clone() for name, tensor in one.weights()},
        "reference": one.reference_log_probs(batch),
    }
    # The weights that were given away are not what the next phase computes with.
    metrics.append(one.train(prepared, STEPS))
    return found


CASES: dict[str, dict[str, Any]] = {
    "data": {"n_minibatches": 2, "max_tokens_per_micro_batch": 25},
    "data, sequences": {
        "micro_batch_size": 3,
        "balance": False,
        "packing": False,
        "reshard": "after_forward",
    },
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
REFERENCE = {"kl_beta": 0.1}


def compare(ranks: Ranks, directory: Path) -> dict[str, Any]:
    """All cases; state and sharded state of each."""
    results: dict[str, Any] = {}
    for case, config in CASES.items():
        for family, tied in MODELS.get(case, [("qwen2", True)]):
            key = f"{case}, {family}, {'tied' if tied else 'untied'}"
            one = trainer(
                model(family, tied=tied), name="grpo", keys=REFERENCE, ranks=ranks, **config
            )
            results[key] = observe(one)
            results[key]["state"] = one.state_dict()
            one.save_sharded(directory / f"sharded-{key}")
            one.save_pretrained(directory / f"model-{key}")
            one.offload()
            one.onload()
    return results


def resume(ranks: Ranks, directory: Path) -> dict[str, Any]:
    """Load what one process saved, whole and sharded; give it back, and train on."""
    results: dict[str, Any] = {}
    for case in ("data", "tensor"):
        for kind in ("whole", "sharded"):
            one = trainer(model(seed=5), keys=REFERENCE, ranks=ranks, **CASES[case])
            if kind == "whole":
                one.load_state_dict(torch.load(directory / "state.pt"))
            else:
                one.load_sharded(directory / "sharded")
            state = deepcopy(one.state_dict())
            results[f"{case}, {kind}"] = {"state": state, "more": one.train(rollout(), 2)}
    return results


if __name__ == "__main__":
    name, rank, folder = sys.argv[1:]
    meeting = f"{folder}/meet-{name}"
    if name == "resume":
        store = torch.distributed.FileStore(meeting, 2)
        world = Ranks(int(rank), 2, store=store, timeout_s=120)
    else:
        world = Ranks.join(int(rank), 2, f"file://{meeting}", device="cpu")
    outcome = globals()[name](world, Path(folder))
    world.close()
    sys.stdout.buffer.write(pickle.dumps(outcome))
