"""Robot modules in two processes that divide them: a policy, and twin critics with followers."""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from rlinf.algorithms.config import PPOConfig
from rlinf.algorithms.supervised import Supervised
from rlinf.models.config import REGISTRY, MLPConfig
from rlinf.trainers.config import ActorConfig, RowTrainerConfig
from rlinf.trainers.policy_conformance import PolicySubject
from rlinf.trainers.ranks import Ranks, Replicas
from rlinf.trainers.trainer import Trainer
from tests.algorithms import test_nft
from tests.models import test_steering
from tests.trainers import test_losses
from tests.trainers.conftest import ENVS, SPEC, STEPS, collect
from tests.trainers.processes import results_of

WIDE = {"first_update_kl_bound": 1e-4, "first_update_ratio_bound": 0.1}


def run(directory: Path) -> list[dict[str, Any]]:
    """What :func:`observe` gives in each of two processes."""
    return results_of(__name__, lambda rank: (rank, directory), seconds=240)


def ppo(ranks: Ranks | Replicas, *, seed: int = 3, lora: Any = None) -> Trainer:
    """Of a policy whose values have a learning rate of their own, with a reference."""
    policy = MLPConfig(hidden_sizes=(15, 16)).build(SPEC, seed=seed)
    config = ActorConfig.model_validate(
        {
            "type": "plain" if isinstance(ranks, Replicas) else "fsdp",
            "global_batch_size": 32,
            "micro_batch_size": 8,
            "update_epoch": 2,
            "optim": {"lr": 1e-3, "value_lr": 3e-3},
            "lora": lora,
            **WIDE,
        }
    )
    algorithm = PPOConfig(kl_beta=0.1).build(family="actions")
    rows = STEPS * ENVS
    return Trainer(
        {"policy": policy}, algorithm, config, ranks=ranks, rows=rows, total_steps=10, seed=5
    )


def imitated(ranks: Ranks | Replicas) -> list[dict[str, float]]:
    """Of policies that imitate by their mode, or layer by layer."""
    found = []
    for kind, objective, spec in (
        ("mlp", "squared_error", SPEC), ("smolvla", "likelihood", test_nft.SPEC),
    ):  # fmt: skip
        config = REGISTRY.load(kind)(**({} if kind == "mlp" else {"preset": "tiny"}))
        subject = PolicySubject(config, spec)
        rows = len(subject.batch)
        given: dict[str, Any] = {"global_batch_size": rows, "micro_batch_size": rows // 2}
        if isinstance(ranks, Ranks):
            given |= {"type": "fsdp", "reshard": "after_forward"}
        trainer = Trainer(
            {"policy": subject.policy()}, Supervised(objective), RowTrainerConfig(**given),
            ranks=ranks, total_steps=2, seed=0,
        )  # fmt: skip
        found += [trainer.train([subject.batch], step) for step in range(2)]
    return found


def observe(ranks: Ranks | Replicas, directory: Path) -> dict[str, Any]:
    """Two phases of each; the state that another process goes on from."""
    one = ppo(ranks)
    actor = MLPConfig(hidden_sizes=(15, 16)).build(SPEC, seed=3)
    metrics = [one.learn(collect(actor), 0)]
    one.offload()
    one.onload()
    weights = {name: tensor.clone() for name, tensor in one.weights()}
    state = one.state_dict()
    if isinstance(ranks, Ranks):
        one.save_sharded(directory / "policy")
    adapted = ppo(ranks, lora={"rank": 2})
    metrics.append(adapted.learn(collect(actor), 0))
    flow = test_nft.trainer(tau=0.5, ranks=ranks)
    made = test_nft.flow_rollout(test_nft.build("pi05", method="ode", value_dim=0))
    metrics.append(flow.learn(made, 0))
    acting = {name: tensor.clone() for name, tensor in flow.weights()}
    if isinstance(ranks, Ranks):
        flow.save_sharded(directory / "flow")
    steered = test_steering.trainer(ranks)
    metrics.append(steered.train(test_steering.transitions(), 0))
    if isinstance(ranks, Ranks):
        steered.save_sharded(directory / "steered")
    twins = test_losses.trainer_of(test_losses.modules(), ranks=ranks)
    metrics += [twins.train(test_losses.batches(), step) for step in range(2)]
    metrics += imitated(ranks)
    found = {name: dict(held.gather(held.master(), keep=True)) for name, held in
             twins.modules.held.items()}  # fmt: skip
    sent = {name: tensor.clone() for name, tensor in adapted.weights()}
    return {
        "metrics": metrics, "weights": weights, "state": state, "twins": found, "adapted": sent,
        "acting": acting, "flow": flow.state_dict(),
        "steered": {name: tensor.clone() for name, tensor in steered.weights()},
    }  # fmt: skip


if __name__ == "__main__":
    rank, folder = sys.argv[1:]
    warnings.filterwarnings("error", message=".*returned a view tensor")
    world = Ranks(int(rank), 2, store=torch.distributed.FileStore(f"{folder}/meet", 2))
    outcome = observe(world, Path(folder))
    world.close()
    sys.stdout.buffer.write(pickle.dumps(outcome))
