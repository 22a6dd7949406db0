from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.distributions import Normal

from rlinf.checkpoint.weights import export_weights
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError, RunFailure
from rlinf.models.config import REGISTRY, CNNConfig, MLPConfig, ModelConfig
from rlinf.models.gaussian import MLPPolicy, gaussian_entropy, gaussian_log_prob
from rlinf.models.observation_normalizer import ObservationNormalizer
from rlinf.models.policy import ACTIONS, RAW_ACTIONS, Policy, require_finite

STATE_DIM, ACTION_DIM = 5, 3


def env_spec(**replaced: Any) -> EnvSpec:
    options: dict[str, Any] = {
        "observation_shapes": {"states": (STATE_DIM,), "main_images": (36, 40, 3)},
        "observation_dtypes": {"states": "float32", "main_images": "uint8"},
        "action_kind": "continuous",
        "action_dim": ACTION_DIM,
        "action_low": (-1.0, -0.5, -2.0),
        "action_high": (1.0, 0.5, 2.0),
        "task_descriptions": (),
        "max_episode_steps": 10,
    }
    return EnvSpec(**(options | replaced))


def observations(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (rows, 36, 40, 3), dtype=np.uint8)
    states = rng.normal(size=(rows, STATE_DIM)).astype(np.float32)
    return {"states": torch.from_numpy(states), "main_images": torch.from_numpy(images)}


def noise(rows: int, chunk: int = 1) -> torch.Tensor:
    return torch.randn(rows, chunk, ACTION_DIM, generator=torch.Generator().manual_seed(4))


CONFIGS: dict[str, ModelConfig] = {
    "mlp": MLPConfig(policy_gain=1.0),
    "mlp chunks": MLPConfig(policy_gain=1.0, num_action_chunks=4, activation="relu"),
    "mlp state-dependent": MLPConfig(policy_gain=1.0, state_dependent_std=True),
    "cnn": CNNConfig(policy_gain=1.0, image_features=16),
    "cnn separate": CNNConfig(
        policy_gain=1.0, image_features=16, shared_encoder=False, use_states=False
    ),
    "cnn critic of states": CNNConfig(
        policy_gain=1.0, image_features=16, critic_reads="states", use_states=False
    ),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


@pytest.fixture
def policy(config: ModelConfig) -> Policy:
    return config.build(env_spec(), seed=1)


def test_shapes_and_the_action_box(policy: Policy) -> None:
    sample = policy.sample(observations(64), {ACTIONS: 3 * noise(64, policy.chunk)})
    assert sample.actions.shape == sample.log_probs.shape == (64, policy.chunk, ACTION_DIM)
    assert policy.value(observations(64)).shape == (64, 1)
    low, high = torch.tensor([-1.0, -0.5, -2.0]), torch.tensor([1.0, 0.5, 2.0])
    assert bool(((sample.actions >= low) & (sample.actions <= high)).all())
    raw = sample.forward_inputs[RAW_ACTIONS]
    assert bool((raw.abs() > 1).any())
    torch.testing.assert_close(sample.actions, raw.clamp(low, high))


def test_training_repeats_what_the_rollout_computed(policy: Policy) -> None:
    seen = observations(32)
    sample = policy.sample(seen, {ACTIONS: noise(32, policy.chunk)})
    evaluation = policy.evaluate_actions(seen | sample.forward_inputs)
    torch.testing.assert_close(evaluation.log_probs, sample.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(evaluation.values, policy.value(seen))
    log_ratio = (evaluation.log_probs - sample.log_probs).sum((1, 2))
    assert (log_ratio.exp() - 1 - log_ratio).mean().abs() < 1e-6


def test_without_noise_the_mode_is_taken(policy: Policy) -> None:
    sample = policy.sample(observations(8), None)
    zero = policy.sample(observations(8), {ACTIONS: torch.zeros(8, policy.chunk, ACTION_DIM)})
    assert torch.equal(sample.actions, zero.actions)
    noisy = policy.sample(observations(8), {ACTIONS: noise(8, policy.chunk)})
    assert bool((noisy.log_probs <= sample.log_probs + 1e-6).all())


def test_every_parameter_gets_a_gradient(policy: Policy) -> None:
    seen = observations(8)
    sample = policy.sample(seen, {ACTIONS: noise(8, policy.chunk)})
    evaluation = policy.evaluate_actions(seen | sample.forward_inputs)
    (evaluation.log_probs.sum() + evaluation.values.sum()).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


def test_value_parameters_do_not_move_the_actions(policy: Policy) -> None:
    owned = {id(parameter) for parameter in policy.value_parameters()}
    assert owned < {id(parameter) for parameter in policy.parameters()}
    before, values = policy.sample(observations(4), None), policy.value(observations(4))
    with torch.no_grad():
        for parameter in policy.value_parameters():
            parameter.add_(0.1)
    after = policy.sample(observations(4), None)
    assert torch.equal(before.actions, after.actions)
    assert not torch.equal(values, policy.value(observations(4)))


def test_weights_depend_on_the_seed_alone(policy: Policy) -> None:
    config = next(c for c in CONFIGS.values() if type(c) is type_of(policy) and same(c, policy))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = config.build(env_spec(), seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, again[name]) for name, value in policy.state_dict().items())
    other = config.build(env_spec(), seed=2).state_dict()
    assert any(not torch.equal(value, again[name]) for name, value in other.items())


def type_of(policy: Policy) -> type[ModelConfig]:
    return MLPConfig if isinstance(policy, MLPPolicy) else CNNConfig


def same(config: ModelConfig, policy: Policy) -> bool:
    shapes = {n: p.shape for n, p in config.build(env_spec()).named_parameters()}
    return shapes == {n: p.shape for n, p in policy.named_parameters()}


def test_gaussian_formulas_against_torch_distributions() -> None:
    mean, action = torch.randn(6, 2, 3), torch.randn(6, 2, 3)
    log_std = torch.randn(2, 3)
    normal = Normal(mean, log_std.exp().expand_as(mean))
    log_prob = gaussian_log_prob(deviation=(action - mean) / log_std.exp(), log_std=log_std)
    torch.testing.assert_close(log_prob, normal.log_prob(action), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gaussian_entropy(log_std=log_std).expand_as(mean), normal.entropy())


@pytest.mark.parametrize("state_dependent", [False, True])
def test_policy_density_is_that_of_its_gaussian(state_dependent: bool) -> None:
    config = MLPConfig(initial_log_std=-0.7, policy_gain=1.0, state_dependent_std=state_dependent)
    policy = config.build(env_spec(), seed=0)
    seen = observations(200)
    draw = noise(200)
    mode = policy.sample(seen, None).forward_inputs[RAW_ACTIONS]
    sample = policy.sample(seen, {ACTIONS: draw})
    raw = sample.forward_inputs[RAW_ACTIONS]
    std = (raw - mode) / draw
    if not state_dependent:
        torch.testing.assert_close(std, torch.full_like(std, 0.4965853), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        sample.log_probs, Normal(mode, std).log_prob(raw), rtol=1e-3, atol=1e-3
    )
    entropy = policy.evaluate_actions(seen | sample.forward_inputs).entropy
    torch.testing.assert_close(entropy, Normal(mode, std).entropy(), rtol=1e-3, atol=1e-3)


def test_first_actions_are_near_zero_and_layers_orthogonal() -> None:
    policy = MLPConfig(hidden_sizes=(8, 8)).build(env_spec(), seed=0)
    assert policy.sample(observations(50), None).actions.abs().max() < 0.1
    weight = policy.actor.layers[1].weight
    assert isinstance(weight, torch.Tensor)
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(8), rtol=1e-4, atol=1e-4)


def test_normalizer_statistics_equal_those_of_all_data() -> None:
    rng = np.random.default_rng(0)
    normalizer = ObservationNormalizer(3, clip=2.0)
    pieces = [torch.from_numpy(rng.normal(2.0, 5.0, (n, 3)).astype(np.float32)) for n in (5, 1, 90)]
    for piece in pieces:
        normalizer.update(piece)
    normalizer.update(torch.zeros(0, 3))
    data = torch.cat(pieces).double().numpy()
    assert normalizer.count.item() == 96
    np.testing.assert_allclose(normalizer.running_mean.numpy(), data.mean(0), rtol=1e-9)
    np.testing.assert_allclose(normalizer.running_variance.numpy(), data.var(0), rtol=1e-9)
    expected = ((data - data.mean(0)) / np.sqrt(data.var(0) + 1e-8)).clip(-2, 2)
    np.testing.assert_allclose(
        normalizer(torch.cat(pieces)).numpy(), expected, rtol=1e-4, atol=1e-5
    )


def test_a_constant_observation_is_normalised_to_zero() -> None:
    normalizer = ObservationNormalizer(1)
    constant = torch.full((100, 1), 0.6123)
    normalizer.update(constant)
    assert not bool(normalizer(constant).any())


def test_normalizer_travels_with_the_weights() -> None:
    trained = MLPConfig(policy_gain=1.0).build(env_spec(), seed=0)
    trained.update_normalizer(observations(100, seed=8))
    received = MLPConfig(policy_gain=1.0).build(env_spec(), seed=5)
    received.load_state_dict(trained.state_dict())
    seen, draw = observations(7), noise(7)
    drawn = {ACTIONS: draw}
    assert torch.equal(received.sample(seen, drawn).actions, trained.sample(seen, drawn).actions)
    more = observations(30, seed=9)
    trained.update_normalizer(more)
    received.update_normalizer(more)
    ours, theirs = trained.state_dict(), received.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_a_critic_there_are_no_values() -> None:
    policy = MLPConfig().build(env_spec(), value_dim=0)
    assert policy.value(observations(4)).shape == (4, 0)
    assert list(policy.value_parameters()) == []
    chunked = MLPConfig(num_action_chunks=4).build(env_spec(), value_dim=4)
    assert chunked.value(observations(4)).shape == (4, 4)
    with pytest.raises(ConfigError, match="legal: 0, 1, 4"):
        MLPConfig(num_action_chunks=4).build(env_spec(), value_dim=2)


def test_several_cameras_and_views() -> None:
    spec = env_spec(
        observation_shapes={"main_images": (36, 40, 3), "extra_view_images": (2, 36, 40, 3)}
    )
    config = CNNConfig(image_keys=("main_images", "extra_view_images"), image_features=8)
    policy = config.build(spec)
    main = observations(3)["main_images"]
    views = torch.stack([main, main.flip(1)], dim=1)
    seen = {"main_images": main, "extra_view_images": views}
    assert policy.value(seen).shape == (3, 1)
    swapped = seen | {"extra_view_images": views.flip(1)}
    assert not torch.equal(policy.value(seen), policy.value(swapped))


def test_cameras_of_an_own_environment() -> None:
    shapes = {"images.camera_top": (36, 40, 3), "images.hand": (36, 40, 3)}
    spec = env_spec(observation_shapes=shapes)
    policy = CNNConfig(image_keys=tuple(shapes), image_features=8, shared_encoder=False).build(spec)
    first, second = (observations(3, seed)["main_images"] for seed in range(2))
    seen = {"images.camera_top": first, "images.hand": second}
    turned = {"images.camera_top": second, "images.hand": first}
    assert not torch.equal(policy.value(seen), policy.value(turned))
    assert {name.split(".")[1] for name in policy.state_dict() if "encoder" in name} == {
        "images_camera_top", "images_hand",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"known: images\.camera_top, images\.hand"):
        CNNConfig().build(spec)
    with pytest.raises(ValidationError, match=r"no name of pictures; .*images\.NAME, main_images"):
        CNNConfig(image_keys=("images.camera/top",))


@pytest.mark.parametrize(
    ("config", "spec", "message"),
    [
        (MLPConfig(), {"observation_shapes": {"main_images": (36, 40, 3)}}, "cnn reads pictures"),
        (CNNConfig(), {"observation_shapes": {"states": (5,)}}, "use mlp for states"),
        (CNNConfig(), {"observation_shapes": {"main_images": (16, 16, 3)}}, "use larger images"),
        (
            MLPConfig(),
            {"action_kind": "discrete"},
            "nearest: categorical_mlp",
        ),
    ],
)
def test_environments_that_do_not_fit_are_refused(
    config: ModelConfig, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config.build(env_spec(**spec))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mlp", {"hidden_sizes": []}, "at least 1 item"),
        ("mlp", {"activation": "sigmoid"}, "'tanh', 'relu'"),
        ("mlp", {"hiden_sizes": [64]}, "Extra inputs"),
        ("cnn", {"strides": [4, 2]}, "channels has 3 entries"),
        ("cnn", {"kernel_sizes": [8, 4, 0]}, "nearest: 1"),
        ("cnn", {"channels": [32, 0, 64]}, "greater than or equal to 1"),
        ("pi0", {"preset": "tiny", "value_head": [-1]}, "greater than or equal to 1"),
    ],
)
def test_illegal_configs_say_what_and_why(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        REGISTRY.load(kind)(type=kind, **options)


def test_registry() -> None:
    assert {"mlp", "cnn"} <= set(REGISTRY.names())
    with pytest.raises(ConfigError, match="did you mean `mlp`"):
        REGISTRY.load("mpl")


def test_a_policy_begins_with_the_weights_of_a_file(
    config: ModelConfig, policy: Policy, tmp_path: Path
) -> None:
    """Its critic too, where the file has one; what is of another shape is refused."""
    path = export_weights(tmp_path / "policy.safetensors", policy.state_dict())
    begun = config.model_copy(update={"path": path})
    begun.check()
    again = begun.build(env_spec(), seed=2).state_dict()
    assert all(torch.equal(again[name], each) for name, each in policy.state_dict().items())
    imitating = config.build(env_spec(), value_dim=0, seed=3).state_dict()
    export_weights(path, imitating)
    expected = config.build(env_spec(), seed=2).state_dict() | imitating
    again = begun.build(env_spec(), seed=2).state_dict()
    assert all(torch.equal(again[name], each) for name, each in expected.items())
    with pytest.raises(ConfigError, match=r"^model\.path: .*is of another model"):
        begun.build(env_spec(action_dim=2, action_low=(-1.0,) * 2, action_high=(1.0,) * 2))
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^path: .* holds no weights, or was cut off"):
        begun.check()
    path.unlink()
    with pytest.raises(ConfigError, match=r"there is no file .*policy\.safetensors"):
        begun.check()


SEVERAL_TASKS = env_spec(
    observation_shapes={"states": (STATE_DIM,), "main_images": (36, 40, 3), "task_ids": ()},
    observation_dtypes={"states": "float32", "main_images": "uint8", "task_ids": "int64"},
    task_descriptions=("reach", "push", "pull"),
)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_every_task_has_a_standard_deviation_of_its_own_where_asked_for(kind: str) -> None:
    config = REGISTRY.load(kind)(policy_gain=1.0, task_dependent_std=True, num_action_chunks=2)
    policy = config.build(SEVERAL_TASKS, seed=1)
    wanted = torch.arange(18).view(3, 2, ACTION_DIM) / 20 - 1
    with torch.no_grad():
        policy.log_std.copy_(wanted.view_as(policy.log_std))
    seen = {**observations(6), "task_ids": torch.tensor([0, 1, 2, 0, 1, 2])}
    draw = noise(6, 2)
    sample = policy.sample(seen, {ACTIONS: draw})
    raw, mode = sample.forward_inputs[RAW_ACTIONS], policy.mode(seen)
    std = wanted.repeat(2, 1, 1).exp()
    torch.testing.assert_close(raw - mode, std * draw, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sample.log_probs, Normal(mode, std).log_prob(raw))
    evaluation = policy.evaluate_actions(seen | sample.forward_inputs)
    torch.testing.assert_close(evaluation.entropy, Normal(mode, std).entropy())
    evaluation.log_probs[:1].sum().backward()
    grad = policy.log_std.grad
    assert isinstance(grad, torch.Tensor)
    assert [bool(of_task.any()) for of_task in grad] == [True, False, False]


def test_a_standard_deviation_is_of_the_task_or_of_the_state() -> None:
    with pytest.raises(ValidationError, match="set one of the two"):
        MLPConfig(task_dependent_std=True, state_dependent_std=True)
    with pytest.raises(ConfigError, match=r"^model\.task_dependent_std: .*has one task"):
        MLPConfig(task_dependent_std=True).build(env_spec())


@pytest.mark.parametrize("kind", ["mlp", "cnn", "squashed_mlp"])
def test_several_tasks_are_told_apart_by_a_one_hot_vector(kind: str) -> None:
    policy = REGISTRY.load(kind)(policy_gain=1.0).build(SEVERAL_TASKS, seed=1)
    seen = observations(6)
    tasks = torch.tensor([0, 1, 2, 0, 1, 2])
    actor = policy.encode({**seen, "task_ids": tasks})
    assert torch.equal(actor[:, -3:], torch.eye(3).repeat(2, 1))
    one = REGISTRY.load(kind)(policy_gain=1.0).build(env_spec(), seed=1).encode(seen)
    assert actor.shape[1] == one.shape[1] + 3
    means = policy.sample({**seen, "task_ids": tasks}, None).actions
    others = policy.sample({**seen, "task_ids": tasks.flip(0)}, None).actions
    assert not torch.equal(means, others)


def test_a_critic_of_states_sees_no_pictures_and_the_actor_no_states() -> None:
    policy = CONFIGS["cnn critic of states"].build(env_spec(), seed=1)
    one, other = observations(4), observations(4, seed=1)
    mixed = {"states": one["states"], "main_images": other["main_images"]}
    assert torch.equal(policy.value(mixed), policy.value(one))
    assert not torch.equal(policy.value(mixed), policy.value(other))
    assert torch.equal(policy.sample(mixed, None).actions, policy.sample(other, None).actions)
    asked = policy.acts_on(env_spec().observation_shapes)
    assert asked == ("main_images",)
    alone = {name: other[name] for name in asked}
    assert torch.equal(policy.sample(alone, None).actions, policy.sample(other, None).actions)
    pictures = env_spec(observation_shapes={"main_images": (36, 40, 3)},
                        observation_dtypes={"main_images": "uint8"})  # fmt: skip
    with pytest.raises(ConfigError, match=r"^model\.critic_reads: .*shows no `states`"):
        CONFIGS["cnn critic of states"].build(pictures)
    with pytest.raises(ValidationError, match="critic that reads states has no encoder"):
        CNNConfig(critic_reads="states", shared_encoder=False)


def test_what_was_not_finite_first_is_named() -> None:
    policy, seen = MLPConfig().build(env_spec()), observations(4)
    actions = policy.sample(seen, None).actions.numpy()
    require_finite(actions, policy, seen, kind="mlp")
    actions[1, 0, 2] = float("nan")
    with pytest.raises(RunFailure, match=r"`mlp` .* in 1 of 4 rows: .* are finite.* check model"):
        require_finite(actions, policy, seen, kind="mlp")
    weight = policy.actor.layers[1].weight
    torch.nn.init.constant_(weight, float("inf"))
    with pytest.raises(RunFailure, match=r"1 tensors .* first `actor\.layers\.1\.weight`"):
        require_finite(actions, policy, seen, kind="mlp")
    seen["states"][2] = float("nan")
    with pytest.raises(RunFailure, match="`states`, which it saw, holds a NaN"):
        require_finite(actions, policy, seen, kind="mlp")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda features: features[:, 1:], r"gives \[4, 4\] torch\.float32"),
        (lambda features: features.double(), r"gives \[4, 5\] torch\.float64"),
        (lambda features: None, "gives NoneType"),
    ],
)
def test_features_that_fit_no_trunk_are_told(
    monkeypatch: pytest.MonkeyPatch, change: Any, told: str
) -> None:
    policy = MLPConfig().build(env_spec())
    right = policy.encode
    monkeypatch.setattr(policy, "encode", lambda seen: change(right(seen)))
    wanted = r"`encode` of a policy gives features \[B, 5\] torch\.float32, as it told"
    with pytest.raises(RunFailure, match=f"{wanted}.*; here it {told}"):
        policy.sample(observations(4), None)


@pytest.mark.parametrize(
    ("section", "other", "said"),
    [
        ({"type": "mlp"}, {"activation": "relu"}, "model.activation: tanh, here relu"),
        ({"type": "mlp"}, {"observation_clip": 5.0}, "model.observation_clip: 10.0, here 5.0"),
        ({"type": "cnn"}, {"strides": (2, 2, 1)}, r"model.strides: \[4, 2, 1\], here \[2, 2, 1\]"),
    ],
)
def test_weights_that_would_compute_something_else_are_refused(
    section: dict[str, Any], other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = REGISTRY.load(section["type"])()
    path = export_weights(tmp_path / "policy.safetensors", {"a": torch.ones(1)}, config.header())
    begun = config.model_copy(update={"path": path})
    begun.check()
    different = begun.model_copy(update=other)
    for refuse in (different.check, lambda: different.check_teacher(path, key="teacher")):
        with pytest.raises(ConfigError, match=f"was trained with {said}.*nearest: model."):
            refuse()
    export_weights(path, {"a": torch.ones(1)}, {"model": section["type"]})  # says nothing of it
    different.check()


def depth_spec(**replaced: Any) -> EnvSpec:
    shapes = {"states": (STATE_DIM,), "main_images": (36, 40, 3), "depth.main": (36, 40)}
    types = {"states": "float32", "main_images": "uint8", "depth.main": "float32"}
    return env_spec(**{"observation_shapes": shapes, "observation_dtypes": types, **replaced})


def test_a_cnn_reads_depth_up_to_its_range():
    policy = CNNConfig(policy_gain=1.0, image_features=16, depth_range=2.0).build(depth_spec())
    seen = {**observations(2), "depth.main": torch.full((2, 36, 40), 0.5)}
    assert set(policy.acts_on(seen)) == set(seen)

    def mode(metres: float) -> torch.Tensor:
        return policy.sample({**seen, "depth.main": torch.full((2, 36, 40), metres)}, None).actions

    assert not torch.equal(mode(0.5), mode(1.5))
    assert torch.equal(mode(2.0), mode(100.0))  # as far as the sky
    first = policy.encoder["main_images"].layers[0]
    assert first.weight.shape[1] == 4
    # The channel is metres by the range, beside colours by 255.
    read = []
    first.register_forward_hook(lambda module, given, out: read.append(given[0]))
    mode(0.5)
    assert torch.equal(read[0][:, 3], torch.full((2, 36, 40), 0.25))


def test_depth_that_nothing_reads_is_left_out_and_asked_for_where_it_is_missing():
    shown = ("main_images", "wrist_images", "depth.main", "depth.wrist")
    assert MLPConfig().unread(shown) == shown
    assert CNNConfig().unread(shown) == shown[1:]
    assert CNNConfig(depth_range=1.0).unread(shown) == ("wrist_images", "depth.wrist")
    others = {name: REGISTRY.load(name) for name in ("pi0", "act", "steered")}
    for name, config in others.items():
        assert config.model_construct().unread(shown) == shown[2:], name
    assert set(CNNConfig().build(depth_spec()).acts_on(depth_spec().observation_shapes)) == {
        "states", "main_images",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"no `depth.main`.*options.depth: true") as refused:
        CNNConfig(depth_range=1.0).build(env_spec())
    assert refused.value.key == "model.depth_range"
    smaller = {"states": (STATE_DIM,), "main_images": (36, 40, 3), "depth.main": (18, 20)}
    with pytest.raises(ConfigError, match=r"of the size of main_images \[36, 40, 3\]"):
        CNNConfig(depth_range=1.0).build(depth_spec(observation_shapes=smaller))
