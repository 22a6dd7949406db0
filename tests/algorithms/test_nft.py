"""Negative-aware fine-tuning: its formulas, what it asks of a policy, how it is divided."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.denoising.config import NFTConfig
from rlinf.algorithms.denoising.nft import (
    NFT,
    OLD,
    SCALE,
    STD,
    WANTED,
    bounded_change,
    candidates,
    energies,
    preference_terms,
    regression_terms,
    signals,
)
from rlinf.envs.results import ACTION_MASK
from rlinf.errors import ConfigError
from rlinf.models.config import REGISTRY
from rlinf.models.policy import draw_noise
from rlinf.models.vla.flow_matching import transition
from rlinf.trainers.config import ActorConfig
from rlinf.trainers.ranks import Ranks, Replicas
from rlinf.trainers.trainer import Trainer, saved_weights
from tests.algorithms.rollouts import flags, random_trajectory
from tests.models.vla.test_pi0_policy import CHUNK, SPEC, STEPS, build, drawn, seen

A = SPEC.action_dim


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nft(**settings: Any) -> NFT:
    found = NFTConfig(**settings).build(family="actions", group_size=2)
    assert isinstance(found, NFT)
    return found


# -- formulas -------------------------------------------------------------------------------------


def test_regression_has_the_minimum_of_the_paper() -> None:
    """At one point with many actions the best v is v_old + (E[(2r − 1)(u − v_old)]) / β, whatever
    β: the difference of what good and bad actions want, around v_old = E[u] (theorem 3)."""
    rows, beta = 400, 0.5
    wanted = normal(rows, 1, 3).double()
    good = torch.rand(rows, 1, generator=torch.Generator().manual_seed(1)).double()
    old = wanted.mean(dim=0, keepdim=True).expand_as(wanted)
    velocity = torch.zeros(1, 1, 3, dtype=torch.float64, requires_grad=True)
    one = {"scale": torch.ones(rows).double(), "std": torch.zeros(rows).double()}

    def loss(at: Tensor) -> Tensor:
        both = candidates(velocity=at.expand_as(wanted), old=old, beta=beta)
        towards, away = (
            energies(velocity=each, wanted=wanted, weighting="constant", **one) for each in both
        )
        terms = regression_terms(good=good, towards=towards, away=away, beta=beta, factor=1.0)
        return terms.mean()

    expected = old[0] + ((2 * good - 1).unsqueeze(-1) * (wanted - old)).mean(dim=0) / beta
    (gradient,) = torch.autograd.grad(loss(velocity), velocity)
    # The loss is a parabola: of curvature 2 β / 3 in each of the three dimensions.
    torch.testing.assert_close(velocity[0] - gradient[0] / (2 * beta / 3), expected)
    (gradient,) = torch.autograd.grad(loss(expected.unsqueeze(0).requires_grad_()), [velocity],
                                      allow_unused=True)  # fmt: skip
    assert gradient is None


def test_energies_equal_a_loop() -> None:
    velocity, wanted = normal(4, 3, 2), normal(4, 3, 2, seed=1)
    scale, std = torch.tensor([1.0, 0.5, 0.25, 0.1]), torch.tensor([0.5, 0.2, 0.1, 0.3])
    own = torch.tensor([[True, True], [True, False], [False, True], [True, True]])
    for weighting in ("constant", "adaptive", "sigma"):
        for whole in (False, True):
            found = energies(
                velocity=velocity, wanted=wanted, scale=scale, std=std,
                weighting=weighting, whole_chunk=whole, own=own,
            )  # fmt: skip
            for n in range(4):
                dims = [d for d in range(2) if own[n, d]]
                groups = [list(range(3))] if whole else [[c] for c in range(3)]
                for place, actions in enumerate(groups):
                    errors = [
                        float(scale[n] * (velocity[n, c, d] - wanted[n, c, d]))
                        for c in actions for d in dims
                    ]  # fmt: skip
                    expected = sum(e * e for e in errors) / len(errors)
                    if weighting == "adaptive":
                        expected /= sum(map(abs, errors)) / len(errors)
                    elif weighting == "sigma":
                        expected /= float(std[n]) ** 2 + 1e-4
                    assert float(found[n, place]) == pytest.approx(expected, rel=1e-5)


def test_preference_is_the_likelihood_of_the_right_choice() -> None:
    towards, away = torch.tensor([[2.0], [1.0]]), torch.tensor([[1.0], [3.0]])
    for good, sign in ((1.0, 1.0), (0.0, -1.0), (0.5, 0.0)):
        found = preference_terms(
            good=torch.full((2, 1), good), towards=towards, away=away, dpo_beta=0.6
        )
        for row in range(2):
            logit = 0.3 * sign * float(towards[row, 0] - away[row, 0])
            assert float(found[row, 0]) == pytest.approx(math.log1p(math.exp(logit)), abs=1e-6)


def test_signals_are_cut_advantages() -> None:
    found = signals(torch.tensor([-9.0, -1.0, 0.0, 0.5, 2.0, 9.0]), clip=2.0)
    assert found.tolist() == [0.0, 0.25, 0.5, 0.625, 1.0, 1.0]


def test_a_change_beyond_the_bound_is_cut_and_has_no_gradient() -> None:
    old = torch.tensor([[[3.0, 4.0], [3.0, 4.0]]])
    velocity = (old + torch.tensor([[[0.3, 0.4], [3.0, -4.0]]])).requires_grad_()
    near = bounded_change(velocity=velocity, old=old, bound=0.2, whole_chunk=False)
    torch.testing.assert_close(near, old + torch.tensor([[[0.3, 0.4], [0.6, -0.8]]]))
    (gradient,) = torch.autograd.grad(near.sum(), velocity)
    assert gradient.tolist() == [[[1.0, 1.0], [0.0, 0.0]]]


@pytest.mark.parametrize("level", ["action_level", "chunk_level"])
@pytest.mark.parametrize("max_drift", [None, 0.5])
def test_dimensions_that_an_environment_lacks_count_nowhere(
    level: Any, max_drift: float | None
) -> None:
    terms = CHUNK if level == "action_level" else 1

    def told(dims: int, own: Tensor | None) -> dict[str, float]:
        velocity, old, wanted = (normal(4, CHUNK, 8, seed=k)[..., :dims] for k in range(3))
        inputs = {OLD: old, WANTED: wanted, SCALE: torch.ones(4), STD: torch.zeros(4)}
        inputs |= {} if own is None else {ACTION_MASK: own}
        batch = Batch.of(inputs=inputs, mask=torch.ones(4, terms))
        batch = replace(batch, advantages=torch.full((4, terms), 0.7))
        one = nft(level=level, max_drift=max_drift)
        loss, metrics = one.velocity_loss(velocity, batch, normalizer=4.0 * terms)
        return {name: float(value) for name, value in metrics.items()} | {"loss": float(loss)}

    own = (torch.arange(8) < 2).expand(4, 8)
    assert told(8, own) == pytest.approx(told(2, None), rel=1e-5)


def test_the_share_changes_evenly() -> None:
    config = NFTConfig(tau=(1.0, 0.2, 10, 20))
    assert [config.share(s) for s in (0, 10, 15, 20, 99)] == pytest.approx([1, 1, 0.6, 0.2, 0.2])
    assert nft(tau=(1.0, 0.2, 10, 20)).averages
    assert not nft().averages


# -- credit ---------------------------------------------------------------------------------------


def rollout(rewards: Tensor) -> Any:
    """Whole episodes of four environments in two groups, of three chunk steps of two actions."""
    return random_trajectory(
        steps=3,
        envs=4,
        chunk=2,
        value_dim=0,
        rewards=rewards.expand(3, 4, 2) / 6,
        truncations=flags(3, 4, [(2, n) for n in range(4)], chunk=2),
        reset_seeds=torch.tensor([5, 5, 6, 6]).expand(3, 4).clone(),
    )


def test_a_group_is_compared_and_a_raw_reward_is_not() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.7, 1.6]).reshape(1, 4, 1)
    batch, metrics = nft().prepare(rollout(rewards))
    half = 0.5 + 0.5 / math.sqrt(2)  # one deviation of two numbers is √2 times half their distance
    assert batch.advantages is not None
    expected = torch.tensor([half, 1 - half, 1 - half, half]).repeat(3)
    torch.testing.assert_close(batch.advantages, expected.unsqueeze(1).expand(12, 2), atol=1e-4,
                               rtol=0)  # fmt: skip
    assert metrics["rollout/good"] == pytest.approx(0.5)
    raw, _ = nft(advantage="raw").prepare(rollout(rewards))
    assert raw.advantages is not None
    torch.testing.assert_close(raw.advantages[:4, 0], torch.tensor([1.0, 0.0, 0.7, 1.0]))
    chosen = {"filter_rewards": True, "rewards_lower_bound": 0.1, "rewards_upper_bound": 0.6}
    kept, _ = nft(**chosen).prepare(rollout(rewards))
    assert kept.weights is not None
    assert kept.weights[:4].tolist() == [1.0, 1.0, 0.0, 0.0]


# -- points of a policy ---------------------------------------------------------------------------


def sampled(policy: Any, rows: int = 6) -> dict[str, Tensor]:
    """Inputs as a rollout leaves them, with the noise of the supervised loss."""
    observations = seen(rows)
    kept = policy.sample(observations, drawn(policy, rows)).forward_inputs
    noise = draw_noise(policy.imitation_noise, (rows,), torch.Generator().manual_seed(8))
    return {name: each.clone() for name, each in (observations | kept | noise).items()}


@pytest.mark.parametrize("method", ["ode", "flow_sde"])
def test_points_that_are_noised_anew_want_what_flow_matching_wants(method: str) -> None:
    policy = build("pi05", method=method, value_dim=0)
    inputs = sampled(policy)
    found = policy.points(inputs, target="x0", resampled=True)
    done = inputs["chain"][:, -1] if method == "ode" else inputs["denoised"]
    assert set((found.time * STEPS).tolist()) <= {1.0, 2.0, 3.0, 4.0}
    t = found.time.reshape(-1, 1, 1)
    torch.testing.assert_close(found.x, t * inputs["noise"] + (1 - t) * done)
    torch.testing.assert_close(found.wanted, (inputs["noise"] - done)[:, :CHUNK, :A])
    assert torch.equal(found.scale, found.time)
    assert bool((found.std == 0).all()) == (method == "ode")


@pytest.mark.parametrize("options", [{}, {"random_steps": "all"}], ids=["one", "all"])
@pytest.mark.parametrize("target", ["x0", "xnext"])
def test_errors_of_velocities_are_errors_of_predictions(options: Any, target: Any) -> None:
    """Against the prediction itself, at points that the rollout passed."""
    policy = build("pi05", method="flow_sde", value_dim=0, **options)
    inputs = sampled(policy)
    found = policy.points(inputs, target=target, resampled=False)
    chain = inputs["chain"]
    if options:
        step = ((1 - found.time) * STEPS).round().long()
        before, after = (chain[torch.arange(len(chain)), step + n] for n in (0, 1))
    else:
        assert torch.equal(found.time, 1 - inputs["step_index"] / STEPS)
        before, after = chain[:, 0], chain[:, 1]
    torch.testing.assert_close(found.x, before)
    velocity = normal(*before.shape, seed=4)
    t = found.time.reshape(-1, 1, 1)
    mean, std = transition("flow_sde", x=before, velocity=velocity, time=found.time, steps=STEPS)
    done = chain[:, -1] if options else inputs["denoised"]
    error = before - t * velocity - done if target == "x0" else mean - after
    torch.testing.assert_close(found.std, std[:, 0, 0])
    torch.testing.assert_close(
        energies(
            velocity=velocity[:, :CHUNK, :A], wanted=found.wanted, scale=found.scale,
            std=found.std, weighting="constant",
        ),
        error[:, :CHUNK, :A].square().mean(dim=-1),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["pi0", "smolvla", "gr00t", "wall_oss"])
def test_what_the_rollout_did_by_the_ode_is_its_velocity(kind: str) -> None:
    given = {"preset": "tiny", "num_action_chunks": CHUNK, "denoising_steps": STEPS}
    policy: Any = REGISTRY.load(kind)(**given, method="ode").build(SPEC, value_dim=0)
    inputs = sampled(policy)
    found = policy.points(inputs, target="x0", resampled=False)
    step = ((1 - found.time) * STEPS).round().long()
    rows = torch.arange(len(step))
    moved = (inputs["chain"][rows, step] - inputs["chain"][rows, step + 1]) * STEPS
    at = {**inputs, "point": found.x, "point_time": found.time}
    velocity = policy.velocity(at)
    assert velocity.requires_grad
    torch.testing.assert_close(velocity, moved[:, :CHUNK, :A], rtol=1e-4, atol=1e-4)


# -- losses and the trainer -----------------------------------------------------------------------


def flow_rollout(policy: Any, steps: int = 3, envs: int = 4) -> Any:
    """A rollout of whole episodes that a policy made of noise."""
    rows = [
        {n: v for n, v in sampled(policy, envs).items() if n not in ("noise", "time")}
        for _ in range(steps)
    ]
    joined = {name: torch.stack([each[name] for each in rows]) for name in rows[0]}
    return random_trajectory(
        steps=steps, envs=envs, chunk=CHUNK, action_dim=A, value_dim=0,
        forward_inputs=joined,
        truncations=flags(steps, envs, [(steps - 1, n) for n in range(envs)], chunk=CHUNK),
        reset_seeds=torch.tensor([5, 5, 6, 6]).expand(steps, envs).clone(),
    )  # fmt: skip


def trainer(
    lora: Any = None, *, micro: int = 3, ranks: Ranks | Replicas | None = None, **settings: Any
) -> Trainer:
    policy = build("pi05", method="ode", value_dim=0)
    config = ActorConfig.model_validate(
        {
            "type": "fsdp" if isinstance(ranks, Ranks) else "plain",
            "global_batch_size": 6,
            "micro_batch_size": micro,
            "optim": {"lr": 1e-3},
            "lora": lora,
        }
    )
    return Trainer({"policy": policy}, nft(**settings), config, ranks=ranks, total_steps=4, seed=2)


@pytest.fixture(scope="module")
def made() -> Any:
    return flow_rollout(build("pi05", method="ode", value_dim=0))


def sent(one: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in one.weights()}


@pytest.mark.parametrize("settings", [
    {"max_drift": 0.1}, {"loss_form": "dpo", "level": "chunk_level", "weight_mode": "constant"},
], ids=["mse", "dpo"])  # fmt: skip
def test_losses_do_not_depend_on_the_split(settings: Any) -> None:
    algorithm = nft(weight_scale=(1.0, 0.2), beta=0.7, **settings)
    rows, terms = 7, 1 if "level" in settings else CHUNK
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 0.5, 1.0])
    inputs = {
        OLD: normal(rows, CHUNK, A), WANTED: normal(rows, CHUNK, A, seed=1),
        SCALE: torch.linspace(0.2, 1, rows), STD: torch.linspace(0, 1, rows),
    }  # fmt: skip
    batch = replace(
        Batch.of(inputs=inputs, mask=torch.ones(rows, terms), weights=weights),
        advantages=torch.linspace(0, 1, rows).unsqueeze(1).expand(rows, terms),
    )
    velocity = normal(rows, CHUNK, A, seed=2)
    whole = algorithm.normalizer(batch)
    loss, metrics = algorithm.velocity_loss(velocity, batch, normalizer=whole)
    assert whole == 6.5 * terms
    parts = [
        algorithm.velocity_loss(each, part, normalizer=whole)
        for each, part in zip(velocity.split(3), batch.split(3), strict=True)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(part[1][name] for part in parts), value)


def test_a_bound_on_the_drift_takes_the_larger_error() -> None:
    """As the clip of PPO it never makes a loss smaller: what moved too far gains nothing by it."""
    rows = 9
    inputs = {
        OLD: normal(rows, CHUNK, A), WANTED: normal(rows, CHUNK, A, seed=1),
        SCALE: torch.ones(rows), STD: torch.ones(rows),
    }  # fmt: skip
    velocity = normal(rows, CHUNK, A, seed=2)
    for row in range(rows):
        one = Batch.of(
            inputs={name: each[row : row + 1] for name, each in inputs.items()},
            mask=torch.ones(1, CHUNK),
        )
        batch = replace(one, advantages=torch.full((1, CHUNK), row / (rows - 1)))
        found = {}
        for bound in (None, 0.1):
            algorithm = nft(**({} if bound is None else {"max_drift": bound}))
            loss, metrics = algorithm.velocity_loss(
                velocity[row : row + 1], batch, normalizer=algorithm.normalizer(batch)
            )
            found[bound] = loss.item(), metrics.get("actor/drift_clip_fraction")
        (free, _), (bounded, clipped) = found[None], found[0.1]
        assert clipped is not None
        assert bounded > free - 1e-6
        assert (bounded > free + 1e-6) == (clipped > 0)


def test_a_phase_does_not_depend_on_micro_batches(made: Any) -> None:
    found = []
    for micro in (6, 2):
        one = trainer(micro=micro, tau=0.5)
        found.append((one.learn(made, 0), sent(one)))
    (first, weights), (second, others) = found
    assert first == pytest.approx(second, rel=1e-4, abs=1e-6)
    assert first["actor/optimizer_steps"] == 2
    assert first["actor/acting_share"] == 0.5
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-3, atol=1e-5)


def test_the_first_loss_is_that_of_equal_velocities(made: Any) -> None:
    """v = v_old before the first update, so that both energies are one and nothing has drifted."""
    one = trainer()
    batch, _ = one.prepare(made)
    modules = one.modules.modules
    with torch.no_grad():
        velocity = modules["policy"](batch, velocity=True)
    torch.testing.assert_close(velocity, batch.inputs[OLD], rtol=1e-5, atol=1e-5)
    again, _ = trainer().prepare(made)
    for name in NFT.asked:
        assert torch.equal(again.inputs[name], batch.inputs[name]), name
    # Not the noise that the rollout began with.
    start = batch.inputs["chain"][:, 0]
    assert not bool(torch.isin(batch.inputs["point"], start).any())


@pytest.mark.parametrize(
    "lora", [None, pytest.param({"rank": 2}, marks=pytest.mark.slow)], ids=["whole", "lora"]
)
def test_those_who_act_follow(made: Any, lora: Any) -> None:
    one = trainer(lora, tau=0.25)
    begun = sent(one)
    one.learn(made, 0)
    acting = sent(one)
    trained = dict(one.modules.modules["policy"].named_parameters())
    names = [name for name in acting if name in trained and trained[name].requires_grad]
    assert names
    moved = 0
    for name in names:
        expected = torch.lerp(begun[name], trained[name].detach(), 0.25)
        torch.testing.assert_close(acting[name], expected, rtol=1e-5, atol=1e-7)
        moved += int(not torch.equal(acting[name], begun[name]))
    assert moved
    state = one.state_dict()
    left = saved_weights(state, "policy")
    for name in names:
        assert torch.equal(left[name], acting[name]), name
    other = trainer(lora, tau=0.25)
    other.load_state_dict(state)
    one.learn(made, 1)
    other.learn(made, 1)
    resumed = sent(other)
    for name, value in sent(one).items():
        assert torch.equal(resumed[name], value), name


def test_those_who_act_leave_the_device_with_the_weights_and_come_back() -> None:
    one = trainer(tau=0.25)
    assert one.average is not None
    for kept in one.average.weights:
        kept.mul_(0.5)
    acting, state = sent(one), copy.deepcopy(one.state_dict())
    one.offload()
    assert {kept.untyped_storage().nbytes() for kept in one.average.weights} == {0}
    offloaded = one.state_dict()
    for name, value in sent(one).items():
        assert torch.equal(acting[name], value), name
    for name, value in state["average"]["weights"].items():
        assert torch.equal(offloaded["average"]["weights"][name], value), name
    one.onload()
    for name, value in sent(one).items():
        assert torch.equal(acting[name], value), name


def test_learning_brings_good_actions_nearer(made: Any) -> None:
    """Velocities become more like what episodes of reward 1 want than what those of 0 want."""
    rewards = torch.zeros_like(made.rewards)
    rewards[:, ::2] = 1.0
    one = trainer(weight_mode="constant")
    batch, _ = one.prepare(replace(made, rewards=rewards))
    wanted, good = batch.inputs[WANTED], (batch.advantages > 0.5).all(dim=1)

    def errors(velocity: Tensor) -> Tensor:
        return (velocity - wanted).square().mean(dim=(1, 2))

    one.train(batch, 0)
    with torch.no_grad():
        now = errors(one.modules.modules["policy"](batch, velocity=True))
    change = now - errors(batch.inputs[OLD])
    assert float(change[good].mean()) < float(change[~good].mean())


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "message"), [
    ({"target_space": "xnext"}, "points that the rollout passed"),
    ({"dpo_beta": 2.0}, "no effect without loss_form: dpo"),
    ({"loss_form": "dpo", "max_drift": 0.1}, "no effect without loss_form: mse"),
    ({"tau": 0.0}, "no shares"),
    ({"tau": (1.0, 0.5, 20, 20)}, "nearest: .1.0, 0.5, 0, 20."),
    ({"weight_scale": (-1.0, 1.0)}, "factors of errors"),
])  # fmt: skip
def test_what_has_no_meaning_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NFTConfig(**given)


@pytest.mark.parametrize(("model", "settings", "message"), [
    ({"type": "mlp"}, {}, "mlp has none; nearest: pi05"),
    ({"type": "openvla_oft", "preset": "tiny"}, {}, "openvla_oft has none"),
    ({"type": "pi05", "preset": "tiny", "method": "flow_noise"}, {}, "deviation of flow_noise"),
    ({"type": "pi0", "preset": "tiny", "method": "ode"},
     {"target_space": "xnext", "xcur_source": "rollout"}, "nothing would be learnt"),
])  # fmt: skip
def test_a_model_that_does_not_fit_is_refused(model: Any, settings: Any, message: str) -> None:
    section = REGISTRY.load(model["type"])(**model)
    with pytest.raises(Exception, match=message):
        raise next(iter(NFTConfig(**settings).model_problems(section)))


def test_groups_of_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="illegal for nft"):
        NFTConfig().build(family="actions", group_size=1)
    NFTConfig(advantage="raw").build(family="actions", group_size=1)
