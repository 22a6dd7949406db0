"""Low-rank adapters in policies for actions: what is trained, sent, kept and refused."""

from dataclasses import replace

import pytest
import torch

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.config import GRPOConfig
from rlinf.errors import ConfigError
from rlinf.models.adapters import AdaptedLinear, LowRankLinear, without_adapter
from rlinf.models.config import CNNConfig, SquashedMLPConfig
from rlinf.models.language_config import AdapterConfig
from rlinf.trainers.config import ActorConfig
from rlinf.trainers.trainer import Trainer, saved_weights
from tests.models.vla import test_pi0_policy as vla
from tests.trainers.test_trainer import SAMPLES, stamped

LORA = {"rank": 2, "alpha": 4.0}


def trainer_of(policy, algorithm, *, lora=LORA, **options):
    config = ActorConfig(global_batch_size=32, update_epoch=2, lora=lora, **options)
    return Trainer({"policy": policy}, algorithm, config, rows=SAMPLES, total_steps=10, seed=5)


def sent(one, make_policy):
    """The policy of a rollout worker after a synchronisation."""
    acting = make_policy()
    acting.load_state_dict(dict(one.weights()), strict=True)
    return acting


def inputs_of(trajectory):
    return {name: column.flatten(0, 1) for name, column in trajectory.forward_inputs.items()}


@pytest.fixture
def trained(make_policy, make_algorithm, rollout):
    """After two phases, each on what the policy did with the weights that were sent to it."""
    one = trainer_of(make_policy(), make_algorithm(), optim={"lr": 1e-2})
    for step in range(2):
        metrics = one.learn(stamped(rollout(sent(one, make_policy), seed=step), step), step)
        assert abs(metrics["actor/first_update_kl"]) < 1e-6
    return one


def test_the_policy_computes_what_the_one_computes_that_its_weights_are_sent_to(
    trained, make_policy, rollout
):
    acting = sent(trained, make_policy)
    inputs = inputs_of(rollout(acting, seed=9))
    with torch.no_grad():
        own = trained.modules.modules["policy"].evaluate_actions(inputs)
        theirs = acting.evaluate_actions(inputs)
    assert torch.equal(own.log_probs, theirs.log_probs)
    assert torch.equal(own.values, theirs.values)
    assert (own.log_probs - make_policy().evaluate_actions(inputs).log_probs).abs().max() > 1e-3


def test_matrices_get_a_change_of_low_rank_and_the_rest_is_trained_whole(trained, make_policy):
    before, after = dict(make_policy().named_parameters()), dict(trained.weights())
    for name, weight in before.items():
        change = after[name] - weight.detach()
        assert change.abs().max() > 0, name
        if name.startswith("actor") and name.endswith("weight"):
            assert torch.linalg.matrix_rank(change.double(), rtol=1e-4) <= 2, name
    critic = after["critic.layers.1.weight"] - before["critic.layers.1.weight"].detach()
    assert torch.linalg.matrix_rank(critic.double(), rtol=1e-4) > 2


def test_a_checkpoint_continues_it_and_holds_the_policy_itself(
    trained, make_policy, make_algorithm, rollout, tmp_path
):
    other = trainer_of(make_policy(), make_algorithm(), optim={"lr": 1e-2})
    torch.save(trained.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other.load_state_dict(state)
    found = saved_weights(state, "policy")
    assert found.keys() == make_policy().state_dict().keys()
    for name, tensor in trained.weights():
        assert torch.equal(found[name], tensor), name
    trajectory = stamped(rollout(sent(trained, make_policy), seed=2), 2)
    assert trained.learn(trajectory, 2) == other.learn(trajectory, 2)
    for (_, mine), (_, theirs) in zip(trained.weights(), other.weights(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_reference_is_the_policy_that_the_run_began_with(make_policy, make_algorithm, rollout):
    one = trainer_of(make_policy(), make_algorithm(kl_beta=0.1), optim={"lr": 1e-2})
    batch, _ = one.prepare(rollout(make_policy()))
    before = one.log_probs(batch)
    one.train(batch, 0)
    assert (one.log_probs(batch) - before).abs().max() > 1e-3
    assert torch.equal(one.reference_log_probs(batch), before)


def test_without_values_adapters_are_all_that_is_trained_and_the_reference_is_without_them():
    policy = vla.build("pi05", value_dim=0, method="flow_sde")
    sample = policy.sample(vla.seen(), vla.drawn(policy))
    algorithm = GRPOConfig(type="grpo", kl_beta=0.1).build(family="actions", group_size=2)
    config = ActorConfig(global_batch_size=vla.ROWS, lora=LORA, optim={"lr": 1e-2})
    one = Trainer({"policy": policy}, algorithm, config, total_steps=10, seed=5)
    batch = one.with_log_probs(
        Batch.of(
            inputs=vla.seen() | sample.forward_inputs,
            mask=torch.ones(vla.ROWS, 1),
            log_probs=sample.log_probs.flatten(1).sum(dim=1, keepdim=True),
            advantages=torch.linspace(-1.0, 1.0, vla.ROWS).unsqueeze(1),
            version=0,
        )
    )
    assert not one.keeps_reference
    one.train(batch, 0)
    assert (one.log_probs(batch) - batch.reference_log_probs).abs().max() > 1e-2
    assert torch.equal(one.reference_log_probs(batch), batch.reference_log_probs)


@pytest.mark.parametrize("make", [AdaptedLinear, LowRankLinear])
def test_every_kind_of_adapted_layer_can_be_switched_off(make):
    plain, features = torch.nn.Linear(4, 3), torch.rand(5, 4)
    layer = make(plain, AdapterConfig(rank=2), generator=torch.Generator().manual_seed(0))
    torch.nn.init.ones_(layer.lora_B)
    changed = layer(features)
    with without_adapter(torch.nn.Sequential(layer)):
        assert torch.equal(layer(features), plain(features))
    assert torch.equal(layer(features), changed)
    assert (changed - plain(features)).abs().max() > 1e-2


def test_matrices_with_adapters_leave_the_device_and_come_back(
    make_policy, make_algorithm, rollout
):
    one = trainer_of(make_policy(), make_algorithm())
    batch, _ = one.prepare(rollout(make_policy()))
    before = one.log_probs(batch)
    one.offload()
    bases = [t for n, t in one.modules.modules["policy"].named_buffers() if "lora_base" in n]
    assert {tensor.untyped_storage().nbytes() for tensor in bases} == {0}
    one.onload()
    assert torch.equal(one.log_probs(batch), before)


def test_layers_are_chosen_by_parts_of_their_names(make_policy, make_algorithm):
    names = {"actor.layers.0", "actor.layers.1", "actor.layers.2"}
    assert set(make_policy().adapted_layers()) == names
    policy = make_policy()
    trainer_of(policy, make_algorithm(), lora={"rank": 1, "target_modules": ["actor.layers.1"]})
    adapted = {name.rpartition(".")[0] for name, _ in policy.named_buffers() if "lora_" in name}
    assert adapted == {"actor.layers.1"}
    with pytest.raises(ConfigError, match=r"no linear layer head; legal: actor\.layers\.0, ") as e:
        trainer_of(make_policy(), make_algorithm(), lora={"target_modules": ["actor", "head"]})
    assert e.value.key == "actor.lora.target_modules"


def test_other_policies_name_their_layers(env_spec):
    squashed = SquashedMLPConfig(hidden_sizes=(8,)).build(env_spec, value_dim=0)
    assert set(squashed.adapted_layers()) == {"actor.layers.0", "actor.layers.1"}
    shapes = {"main_images": (36, 36, 3)}
    images = replace(
        env_spec, observation_shapes=shapes, observation_dtypes={"main_images": "uint8"}
    )
    cnn = CNNConfig(channels=(4,), kernel_sizes=(8,), strides=(4,), hidden_sizes=(8,))
    names = set(cnn.build(images).adapted_layers())
    assert names == {"actor.layers.0", "actor.layers.1", "encoder.main_images.layers.3"}
