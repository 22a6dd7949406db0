"""The value network."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from rlinf.errors import RunFailure
from rlinf.trainers.config import CriticTrainerConfig
from rlinf.trainers.language_trainers import critic_trainer
from rlinf.trainers.ranks import Ranks
from tests.trainers.language_models import algorithm, model, random_batch

PPO = {"value_clip": None}


def critic(of=None, **config):
    config = {"optim": {"lr": 3e-3}} | config
    return critic_trainer(
        of or model(),
        algorithm("ppo", **PPO),
        CriticTrainerConfig.model_validate(config),
        ranks=Ranks(),
        total_steps=10,
        seed=0,
    )


def prepared(**replaced):
    return algorithm("ppo", **PPO).prepare(random_batch(**replaced))[0]


def test_learns_a_constant():
    one = critic(n_minibatches=2)
    assert torch.equal(one.values(random_batch()), torch.zeros(12, 7))
    batch = prepared(rewards=torch.full((12,), 1.5), values=torch.zeros(12, 7))
    metrics = [one.train(batch, step) for step in range(40)]
    values = one.values(batch)
    assert metrics[-1]["critic/value_loss"] < 0.01 * metrics[0]["critic/value_loss"]
    assert (values - 1.5).abs()[batch.mask > 0].max() < 0.3
    assert bool((values[batch.mask == 0] == 0).all())


def test_a_value_depends_on_what_stands_before_the_token():
    one = critic()
    torch.nn.init.normal_(one.modules.held["critic"].named["head.weight"].data)
    batch = random_batch()
    ids = batch.inputs["input_ids"].clone()
    ids[:, 5 + 2] = (ids[:, 5 + 2] + 4) % 19
    before, after = (
        one.values(batch),
        one.values(replace(batch, inputs={**batch.inputs, "input_ids": ids})),
    )
    assert torch.equal(before[:, :3], after[:, :3])
    counted = batch.mask[:, 3] > 0
    assert bool((before[:, 3] != after[:, 3])[counted].all())


@pytest.mark.parametrize(
    "split",
    [{"micro_batch_size": 1}, {"max_tokens_per_micro_batch": 20}, {"packing": False}],
)
def test_steps_do_not_depend_on_the_split(split):
    one, other = critic(), critic(**split)
    batch = prepared()
    for step in range(2):
        one.train(batch, step)
        other.train(batch, step)
    torch.testing.assert_close(one.values(batch), other.values(batch), atol=2e-5, rtol=1e-4)


def test_the_policy_is_not_touched():
    of = model()
    before = {name: p.detach().clone() for name, p in of.named_parameters()}
    critic(of).train(prepared(), 0)
    assert all(torch.equal(p, before[name]) for name, p in of.named_parameters())
    assert of.config._attn_implementation != "rlinf_packed"


def test_state_and_shards_continue(tmp_path):
    one, batch = critic(), prepared()
    one.train(batch, 0)
    one.save_sharded(tmp_path)
    state = deepcopy(one.state_dict())
    other, third = critic(model(seed=3)), critic(model(seed=4))
    other.load_state_dict(state)
    third.load_sharded(tmp_path)
    assert one.train(batch, 1) == other.train(batch, 1) == third.train(batch, 1)
    assert torch.equal(one.values(batch), third.values(batch))


def test_state_is_saved_while_offloaded():
    everything = {"weights": True, "gradients": True, "optimizer": True}
    one, other, batch = critic(offload=everything), critic(), prepared()
    one.train(batch, 0)
    other.train(batch, 0)
    one.offload()
    with pytest.raises(RuntimeError, match="call onload first"):
        one.values(batch)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for name, tensor in one.state_dict()["modules"]["critic"][kind].items():
            assert torch.equal(tensor, other.state_dict()["modules"]["critic"][kind][name])
    one.onload()
    assert torch.equal(one.values(batch), other.values(batch))


def test_too_many_skipped_updates_end_the_run():
    batch = prepared()
    broken = replace(batch, returns=torch.full_like(batch.mask, torch.nan))
    with pytest.raises(RunFailure, match=r"lower critic\.optim\.lr"):
        critic(max_skipped_updates=0).train(broken, 0)
