"""Several losses in one trainer: each trains its own modules, and some follow."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.protocol import Algorithm, Loss
from rlinf.errors import CheckpointError, RunFailure
from rlinf.trainers.config import OptimizerConfig, TrainerConfig
from rlinf.trainers.ranks import Ranks, Replicas, sum_ranks
from rlinf.trainers.trainer import Trainer

ROWS, STATES, ACTIONS, TAU = 16, 4, 2, 0.25
SMOOTH = OptimizerConfig(lr=1e-2, max_grad_norm=1.0)


class Policy(nn.Module):
    """Actions of states."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(STATES, ACTIONS)

    def forward(self, states):
        return torch.tanh(self.layer(states))


class TwinCritic(nn.Module):
    """Two Q functions, [2, N]."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(STATES + ACTIONS, 8), nn.Tanh(), nn.Linear(8, 1))
            for _ in range(2)
        )

    def forward(self, states, actions):
        inputs = torch.cat([states, actions], dim=-1)
        return torch.stack([head(inputs).squeeze(-1) for head in self.heads])


class Temperature(nn.Module):
    """One number."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(1))

    def forward(self):
        return self.log.exp()


class ActorCritic(Algorithm):
    """Deterministic policy gradient with twin critics, their targets and a bound on actions."""

    def prepare(self, rollout):
        return rollout, {}

    def normalizer(self, batch):
        return float(len(batch))

    def losses(self):
        return (
            Loss("critic", ("critic",), self.of_critic),
            Loss("policy", ("policy",), self.of_policy),
            Loss("temperature", ("temperature",), self.of_temperature),
        )

    def of_critic(self, modules, batch, normalizer):
        states = batch.inputs["states"]
        with torch.no_grad():
            ahead = modules["target"](states, modules["policy"](states)).amin(dim=0)
        values = modules["critic"](states, batch.inputs["actions"])
        errors = (values - (batch.rewards + 0.9 * ahead)).square().mean(dim=0)
        return errors.sum() / normalizer, {}

    def of_policy(self, modules, batch, normalizer):
        states = batch.inputs["states"]
        actions = modules["policy"](states)
        value = modules["critic"](states, actions).amin(dim=0)
        cost = modules["temperature"]().detach() * actions.square().sum(-1)
        return (cost - value).sum() / normalizer, {}

    def of_temperature(self, modules, batch, normalizer):
        with torch.no_grad():
            size = modules["policy"](batch.inputs["states"]).square().sum(-1)
        return (modules["temperature"]() * (0.5 - size)).sum() / normalizer, {}

    @torch.no_grad()
    def after_update(self, modules):
        pairs = zip(modules["target"].parameters(), modules["critic"].parameters(), strict=True)
        for target, source in pairs:
            target.lerp_(source, TAU)


def modules(seed=0):
    torch.manual_seed(seed)
    made = {"policy": Policy(), "critic": TwinCritic(), "temperature": Temperature()}
    target = TwinCritic()
    target.load_state_dict(made["critic"].state_dict())
    return made | {"target": target}


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs = {
            "states": torch.randn(ROWS, STATES, generator=generator),
            "actions": torch.randn(ROWS, ACTIONS, generator=generator).tanh(),
        }
        rewards = torch.randn(ROWS, generator=generator)
        yield Batch.of(inputs=inputs, mask=torch.ones(ROWS, 1), rewards=rewards)


def trainer_of(named, *, ranks=None, **config):
    config = {"optim": SMOOTH, "micro_batch_size": 4} | config
    rates = {"temperature": OptimizerConfig(lr=0.1, max_grad_norm=None)}
    return Trainer(
        named,
        ActorCritic(),
        TrainerConfig(**config),
        ranks=ranks,
        optim=rates,
        total_steps=10,
        seed=0,
    )


def by_hand(named, given):
    """The same with torch's optimizers, one loss after the other; norms of the gradients, before
    they are clipped."""
    norms = {"policy": [], "critic": []}
    algorithm = ActorCritic()
    rates = {"critic": 1e-2, "policy": 1e-2, "temperature": 0.1}
    steps = {
        name: torch.optim.AdamW(named[name].parameters(), lr=rate, eps=1e-5, weight_decay=0.0)
        for name, rate in rates.items()
    }
    for batch in given:
        for loss in algorithm.losses():
            for module in named.values():
                module.zero_grad()
            loss.of(named, batch, algorithm.normalizer(batch))[0].backward()
            if loss.name != "temperature":
                norm = torch.nn.utils.clip_grad_norm_(named[loss.name].parameters(), 1.0)
                norms[loss.name].append(norm.item())
            steps[loss.name].step()
        algorithm.after_update(named)
    return norms


def weights(named):
    return {
        f"{name}.{key}": tensor.detach().clone()
        for name, module in named.items()
        for key, tensor in module.named_parameters()
    }


@pytest.mark.parametrize("ranks", [None, Ranks()], ids=["tree", "running"])
def test_each_loss_steps_its_own_modules_alone(ranks):
    expected, found = modules(), modules()
    norms = by_hand(expected, batches())
    metrics = trainer_of(found, ranks=ranks).train(batches(), 0)
    assert metrics["actor/grad_norm"] == pytest.approx(sum(norms["policy"]) / 3, rel=1e-4)
    assert metrics["critic/grad_norm"] == pytest.approx(sum(norms["critic"]) / 3, rel=1e-4)
    for name, tensor in weights(expected).items():
        torch.testing.assert_close(weights(found)[name], tensor, rtol=1e-5, atol=1e-6)
    for prefix in ("actor", "critic", "temperature"):
        assert metrics[f"{prefix}/optimizer_steps"] == 3
    assert metrics["actor/lr"] == 1e-2
    assert metrics["temperature/lr"] == 0.1


@pytest.mark.parametrize("ranks", [None, Ranks()], ids=["tree", "running"])
def test_no_gradient_reaches_what_a_loss_does_not_train(ranks):
    named = modules()
    one = trainer_of(named, ranks=ranks)
    batch = next(batches())
    before = weights(named)
    # The loss of the policy passes through the Q functions.
    update = one._update(one._losses[1], batch, step=0, factor=1.0)
    assert update.outcome == "applied"
    changed = {n.split(".")[0] for n, t in weights(named).items() if not torch.equal(t, before[n])}
    assert changed == {"policy"}
    for name in ("critic", "temperature", "target"):
        assert one.modules.norms([name]) == {name: 0.0}


def test_two_ranks_give_the_same_bits_as_one_process():
    alone = modules()
    expected = trainer_of(alone).train(batches(), 0)
    parts, barrier = [None, None], threading.Barrier(2)
    made = [modules(), modules()]

    def train(rank):
        def all_reduce(part):
            parts[rank] = part
            barrier.wait()
            total = sum_ranks(parts)
            barrier.wait()
            return total

        ranks = Replicas(rank, 2, all_reduce=all_reduce)
        return trainer_of(made[rank], ranks=ranks).train(batches(), 0)

    with ThreadPoolExecutor(2) as pool:
        for rank, metrics in enumerate(pool.map(train, range(2))):
            assert metrics == expected
            for name, tensor in weights(made[rank]).items():
                assert torch.equal(tensor, weights(alone)[name])


def test_only_losses_whose_modules_are_here_are_run():
    named = modules()
    del named["policy"]
    assert [loss.name for loss in trainer_of(named)._losses] == ["critic", "temperature"]


def test_state_holds_followers_and_continues():
    one, batch = trainer_of(modules()), list(batches())
    one.train(batch, 0)
    state = torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, one.state_dict()
    )
    assert set(state["modules"]) == {"policy", "critic", "temperature", "target"}
    assert "exp_avg" not in state["modules"]["target"]
    other = trainer_of(modules(seed=5))
    other.load_state_dict(state)
    assert one.train(batch, 1) == other.train(batch, 1)
    for name, held in one.modules.held.items():
        for key, tensor in held.module.state_dict().items():
            assert torch.equal(other.modules.modules[name].state_dict()[key], tensor)
    with pytest.raises(CheckpointError, match="older format"):
        other.load_state_dict({"policy": {}, "optimizer": {}})


def test_each_loss_counts_its_own_skipped_updates():
    named = modules()
    one = trainer_of(named, max_skipped_updates=1)
    given = list(batches(2))
    spoilt = [Batch.of(inputs=b.inputs, mask=b.mask, rewards=b.rewards * torch.nan) for b in given]
    first = one.train(spoilt[:1], 0)
    assert first["critic/skipped_updates"] == 1
    assert first["actor/optimizer_steps"] == 1
    with pytest.raises(RunFailure, match=r"lower actor\.optim\.lr"):
        one.train(spoilt, 1)
