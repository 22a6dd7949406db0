"""A frozen policy that is steered by its noise: what acts, what is trained, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf.algorithms.denoising.config import DSRLConfig
from rlinf.errors import ConfigError
from rlinf.models.policy import RAW_ACTIONS, draw_noise
from rlinf.models.policy_weights import load_travelling, travelling
from rlinf.models.steering import CompactEncoder, NoiseQFunctions, SteeredPolicy
from rlinf.models.steering_config import SteeredConfig
from rlinf.trainers.config import RowTrainerConfig
from rlinf.trainers.ranks import Ranks, Replicas
from rlinf.trainers.trainer import Trainer
from tests.algorithms.rollouts import flags, random_trajectory
from tests.models.vla.test_pi0_policy import CHUNK, SPEC, STEPS, seen

BASE = {
    "type": "pi05", "preset": "tiny", "num_action_chunks": CHUNK, "denoising_steps": STEPS,
    "method": "ode",
}  # fmt: skip
DIFFUSION = {
    "type": "diffusion", "preset": "tiny", "num_action_chunks": CHUNK, "denoising_steps": 2,
    "method": "ddim",
}  # fmt: skip
SMALL: dict[str, Any] = {
    "base": BASE, "channels": (4, 4), "kernel_sizes": (3, 3), "strides": (4, 4),
    "hidden_sizes": (16,), "q_hidden_sizes": (16,), "q_functions": 3,
    "image_keys": ("main_images", "wrist_images"), "image_features": 8, "state_features": 6,
    "policy_gain": 1.0,
}  # fmt: skip
ROWS = 5


def section(**options: Any) -> SteeredConfig:
    return SteeredConfig.model_validate(SMALL | options)


def built(seed: int = 0, **options: Any) -> SteeredPolicy:
    policy = section(**options).build(SPEC, value_dim=0, seed=seed)
    assert isinstance(policy, SteeredPolicy)
    return policy


def drawn(policy: SteeredPolicy, rows: int = ROWS, seed: int = 4) -> dict[str, Tensor]:
    return draw_noise(policy.noise, (rows,), torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def policy() -> SteeredPolicy:
    return built()


@pytest.mark.parametrize(("noise", "base"), [("one", BASE), ("each", BASE), ("one", DIFFUSION)])
def test_the_frozen_policy_acts_from_what_was_chosen(noise: str, base: dict[str, Any]) -> None:
    policy = built(noise=noise, base=base, noise_bound=1.5, policy_gain=0.1)
    observations, given = seen(ROWS), drawn(policy)
    horizon, dim = policy.frozen.noise["start"].shape
    found = policy.sample(observations, given)
    chosen = found.forward_inputs[RAW_ACTIONS]
    assert chosen.shape == (ROWS, 1 if noise == "one" else horizon, dim)
    mean, log_std = policy.steering._distribution(policy.steering.encode(observations))
    inner = mean + log_std.exp() * given["actions"]
    torch.testing.assert_close(chosen, 1.5 * torch.tanh(inner))
    start = chosen.expand(ROWS, horizon, dim)
    assert torch.equal(found.actions, policy.frozen.sample(observations, {"start": start}).actions)
    # The density of the noise, scaled to [−1, 1], by the change of variables.
    density = torch.distributions.Normal(mean, log_std.exp()).log_prob(inner)
    density = density - torch.log(1 - torch.tanh(inner) ** 2)
    torch.testing.assert_close(
        found.log_probs.flatten(1).sum(1), density.flatten(1).sum(1), rtol=1e-4, atol=1e-3
    )
    again, log_probs = policy(observations, given["actions"])
    assert again.requires_grad
    torch.testing.assert_close(again, chosen)
    torch.testing.assert_close(log_probs, density.flatten(1).sum(1), rtol=1e-4, atol=1e-3)
    likeliest = policy.sample(observations, None).forward_inputs[RAW_ACTIONS]
    torch.testing.assert_close(likeliest, 1.5 * torch.tanh(mean))


def test_exploring_is_uniform_within_the_bound(policy: SteeredPolicy) -> None:
    found = policy.explore(seen(ROWS), drawn(policy))
    chosen = found.forward_inputs[RAW_ACTIONS]
    expected = 2 * torch.special.ndtr(drawn(policy)["actions"]) - 1
    torch.testing.assert_close(chosen, expected)
    numbers = chosen[0].numel()
    torch.testing.assert_close(
        found.log_probs.flatten(1).sum(1), torch.full((ROWS,), -numbers * math.log(2.0))
    )


def test_what_is_frozen_is_neither_trained_nor_sent(policy: SteeredPolicy) -> None:
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained
    assert all(name.startswith("steering.") for name in trained)
    sent = travelling(policy)
    assert {name for name in sent if name in dict(policy.named_parameters())} == set(trained)
    other = built(seed=0)
    for name, parameter in other.steering.named_parameters():
        parameter.data.add_(1.0)
        assert name
    load_travelling(other, sent, base=policy.base)
    observations, given = seen(ROWS), drawn(policy)
    assert torch.equal(
        other.sample(observations, given).actions, policy.sample(observations, given).actions
    )
    assert policy.base == "pi05 tiny, seed 0"
    with pytest.raises(ConfigError, match="trained from other weights"):
        load_travelling(other, sent, base="pi05 tiny, seed 9")


def test_values_are_of_the_noise_and_of_what_is_seen() -> None:
    config = section()
    config.build(SPEC, value_dim=0)
    functions = config.build_q_functions(SPEC, seed=1)
    assert isinstance(functions, NoiseQFunctions)
    dim = (config.noise_shape or ())[-1]
    observations, noise = seen(ROWS), torch.rand(ROWS, 1, dim) * 2 - 1
    values = functions(observations, noise)
    assert values.shape == (3, ROWS)
    assert not torch.equal(values, functions(observations, -noise))
    assert not torch.equal(values[0], values[1])
    darker = {**observations, "wrist_images": observations["wrist_images"] // 2}
    assert not torch.equal(values, functions(darker, noise))
    alone = section().build_q_functions(SPEC, seed=1)  # which builds a base to know its noise
    torch.testing.assert_close(alone(observations, noise), values)


# -- training -------------------------------------------------------------------------------------


def transitions(**options: Any) -> Any:
    """A rollout of random noise, as batches."""
    policy = built(**options)
    steps, envs = 4, 4
    rows = [
        seen(envs) | policy.explore(seen(envs), drawn(policy, envs, seed=n)).forward_inputs
        for n in range(steps)
    ]
    inputs = {name: torch.stack([row[name] for row in rows]).clone() for name in rows[0]}
    after = {name: each.flip(0) for name, each in inputs.items() if name != RAW_ACTIONS}
    trajectory = random_trajectory(
        steps=steps, envs=envs, chunk=CHUNK, action_dim=SPEC.action_dim, value_dim=0,
        forward_inputs=inputs, next_observations=after,
        terminations=flags(steps, envs, [(2, 1)], chunk=CHUNK),
    )  # fmt: skip
    algorithm = DSRLConfig(gamma=0.9).build(family="actions")
    batch, _ = algorithm.prepare(trajectory)
    generator = torch.Generator().manual_seed(3)
    return [algorithm.with_noise(batch.select(slice(n, n + 8)), generator) for n in (0, 8)]


def trainer(ranks: Ranks | Replicas | None = None, *, micro: int = 4, **options: Any) -> Trainer:
    algorithm, config = DSRLConfig(gamma=0.9).build(family="actions"), section(**options)
    learner = RowTrainerConfig.model_validate(
        {
            "type": "fsdp" if isinstance(ranks, Ranks) else "plain",
            "global_batch_size": 8,
            "micro_batch_size": micro,
            "optim": {"lr": 1e-2},
        }
    )
    modules = algorithm.modules(config, SPEC, seed=0)
    return Trainer(modules, algorithm, learner, ranks=ranks, total_steps=4, seed=2)


def kept(one: Trainer) -> dict[str, Tensor]:
    found = {
        f"{name}.{key}": tensor.detach().clone()
        for name, module in one.modules.modules.items()
        for key, tensor in module.named_parameters()
    }
    return found


def test_targets_are_the_mean_of_all_functions_without_entropy() -> None:
    one, (_, batch) = trainer(), transitions()
    modules = one.modules.modules
    seen_next = {n.removeprefix("next."): c for n, c in batch.inputs.items() if "next." in n}
    with torch.no_grad():
        noise, _ = modules["policy"](seen_next, batch.inputs["next_noise"])
        following = modules["target_critic"](seen_next, noise).mean(dim=0)
        values = modules["critic"](batch.inputs, batch.inputs[RAW_ACTIONS])
    expected = batch.rewards + batch.inputs["discounts"] * following
    assert batch.inputs["discounts"].unique().tolist() == pytest.approx([0.0, 0.9**CHUNK])
    algorithm = DSRLConfig(gamma=0.9).build(family="actions")
    critic, policy, temperature = algorithm.losses()
    loss, metrics = critic.of(modules, batch, 8.0)
    torch.testing.assert_close(loss, (values - expected).square().mean())
    torch.testing.assert_close(metrics["critic/targets"], expected.mean())
    chosen, log_probs = modules["policy"](batch.inputs, batch.inputs["noise"])
    wanted = (log_probs - modules["critic"](batch.inputs, chosen).mean(dim=0)).mean()
    torch.testing.assert_close(policy.of(modules, batch, 8.0)[0], wanted)
    torch.testing.assert_close(
        temperature.of(modules, batch, 8.0)[0], -(log_probs - 16.0).mean().detach()
    )


@pytest.mark.parametrize("base", [BASE, DIFFUSION], ids=["pi05", "diffusion"])
def test_training_does_not_depend_on_micro_batches_and_goes_on_from_its_state(
    base: dict[str, Any],
) -> None:
    batches = transitions(base=base)
    one, two = trainer(micro=8, base=base), trainer(micro=2, base=base)
    begun = kept(one)
    first, second = one.train(batches, 0), two.train(batches, 0)
    assert first == pytest.approx(second, rel=1e-3, abs=1e-5)
    frozen = {n: v for n, v in begun.items() if ".frozen." in n}
    after = kept(one)
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    assert any(not torch.equal(after[n], v) for n, v in begun.items() if ".steering." in n)
    one.observe(batches[0].inputs)
    state = one.state_dict()
    assert "steering.encoder.normalizer.mean" in state["modules"]["policy"]["buffers"]
    assert float(state["modules"]["critic"]["buffers"]["encoder.normalizer.count"]) == 8
    assert not any("frozen" in name for name in state["modules"]["policy"]["master"])
    resumed = trainer(micro=8, base=base)
    resumed.load_state_dict(state)
    one.train(batches, 1)
    resumed.train(batches, 1)
    again = kept(resumed)
    assert all(torch.equal(again[name], value) for name, value in kept(one).items())


def test_noise_is_chosen_by_cameras_of_any_name() -> None:
    shape = SPEC.observation_shapes["main_images"]
    spec = replace(
        SPEC,
        observation_shapes=SPEC.observation_shapes | {"images.hand": shape},
        observation_dtypes=SPEC.observation_dtypes | {"images.hand": "uint8"},
    )
    config = section(image_keys=("main_images", "images.hand"), use_states=False)
    encoder = CompactEncoder(config, spec, generator=torch.Generator().manual_seed(0))
    shown = seen(ROWS) | {"images.hand": seen(ROWS)["main_images"].flip(0)}
    swapped = shown | {
        "main_images": shown["images.hand"], "images.hand": shown["main_images"],
    }  # fmt: skip
    assert encoder(shown).shape == (ROWS, encoder.width)
    assert not torch.equal(encoder(shown), encoder(swapped))


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "message"), [
    ({"base": {"type": "mlp"}}, "mlp does not denoise its actions.*nearest: pi05"),
    ({"base": {"type": "act", "preset": "tiny"}}, "act does not denoise its actions"),
    ({"base": BASE | {"method": "flow_sde"}}, "noise that is not chosen; nearest: ode"),
    ({"base": DIFFUSION | {"method": "ddpm"}}, "noise that is not chosen; nearest: ddim"),
    ({"num_action_chunks": 2}, "is not that of base.*nearest: 4"),
    ({"strides": (2,)}, "1 numbers for 2 convolutions"),
    ({"image_keys": (), "use_states": False}, "chosen by nothing; nearest"),
])  # fmt: skip
def test_sections_that_do_not_fit_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section(**given)


def test_environments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="gives no values"):
        section().build(SPEC, value_dim=1)
    with pytest.raises(ConfigError, match="is to be pictures"):
        section(image_keys=("extra_view_images",)).build(SPEC, value_dim=0)
    shown = {"main_images": SPEC.observation_shapes["main_images"]}
    types = {"main_images": "uint8"}
    stateless = replace(SPEC, observation_shapes=shown, observation_dtypes=types)
    with pytest.raises(ConfigError, match="neither pictures nor states"):
        section(image_keys=()).build(stateless, value_dim=0)
    several = replace(
        SPEC,
        observation_shapes=SPEC.observation_shapes | {"action_mask": (SPEC.action_dim,)},
        observation_dtypes=SPEC.observation_dtypes | {"action_mask": "bool"},
    )
    with pytest.raises(ConfigError, match="no noise in common"):
        section().build(several, value_dim=0)


def test_exploring_stays_within_the_bound_and_fills_it() -> None:
    policy = built(noise_bound=1.5)
    steering: Any = policy.steering
    chosen = torch.cat([
        policy.explore(seen(ROWS), drawn(policy, seed=seed)).forward_inputs[RAW_ACTIONS]
        for seed in range(40)
    ])  # fmt: skip
    away = (chosen - steering.centre) / steering.radius
    assert away.abs().max() <= 1
    assert away.std().item() == pytest.approx(1 / math.sqrt(3), abs=0.05)
    assert (steering.radius != 1).all()
