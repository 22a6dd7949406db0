"""The diffusion policy against the original code (see make_parity.py), and as a policy."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributions import Normal

from rlinf.errors import ConfigError
from rlinf.models.config import REGISTRY, type_of_directory
from rlinf.models.policy import draw_noise
from rlinf.models.visuomotor.diffusion_policy import DiffusionPolicy
from rlinf.models.visuomotor.noise_schedule import both_ends, kept_shares, mixed, posterior
from rlinf.models.visuomotor.unet import DiffusionNetwork, DiffusionSize

from .support import (
    BOTH,
    CHUNK,
    PARITY,
    PUBLISHED,
    ROWS,
    SPEC,
    as_before_processors,
    checksum,
    copied,
    drawn,
    observed,
    published,
    seen,
    tiny,
)

STEPS, HORIZON = 4, 8
NAMES = "fc53ccc055e62f362f89ec8f3ce8bfd951c4c7bfc78c6ee4c5525d9bd196d4e6"
"""What `make_parity.py names` prints for the published size, of all that is not computed."""
PLAIN: dict[str, Any] = {
    "num_action_chunks": 6,
    "denoising_steps": STEPS,
    "repeat_observation": True,
}
GIVEN: dict[str, Any] = {**PLAIN, "random_steps": "all", "min_std": 0}


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(PARITY / "diffusion" / "io.safetensors")


@pytest.fixture(scope="module")
def original() -> DiffusionPolicy:
    assert type_of_directory(PARITY / "diffusion") == "diffusion"
    policy = published("diffusion", PARITY / "diffusion", **GIVEN)
    assert isinstance(policy, DiffusionPolicy)
    return policy


@pytest.fixture(scope="module", params=["one", "all"])
def policy(request: pytest.FixtureRequest) -> DiffusionPolicy:
    return tiny("diffusion", denoising_steps=STEPS, random_steps=request.param)


def test_actions_are_those_of_the_original(
    original: DiffusionPolicy, io: dict[str, Tensor]
) -> None:
    noise = {"start": io["start"], "steps": io["steps"]}
    found = original.sample(observed(io), noise).actions
    assert io["acted"].std() > 0.1
    assert found.shape == io["acted"].shape == (2, 6, 3)
    torch.testing.assert_close(found, io["acted"], atol=1e-5, rtol=0)


def test_without_random_steps_they_are_those_of_its_other_scheduler(io: dict[str, Tensor]) -> None:
    policy = published("diffusion", PARITY / "diffusion", **PLAIN, method="ddim")
    found = policy.sample(observed(io), {"start": io["start"]}).actions
    assert (io["acted"] - io["acted_ddim"]).abs().max() > 0.01
    torch.testing.assert_close(found, io["acted_ddim"], atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match=r"ddim has no random step .* nearest: ddpm"):
        policy.evaluate_actions(observed(io))


def test_the_loss_is_that_of_the_original(original: DiffusionPolicy, io: dict[str, Tensor]) -> None:
    """All of it: what is executed, and what the original learns beside it."""
    actions = original.action_units.normalize(io["actions"])
    x = mixed(actions=actions, noise=io["noise"], kept=original.kept[io["time"]])
    (condition,) = original._read(observed(io))
    errors = (original.network.denoise(condition, x, io["time"]) - io["noise"]).square()
    torch.testing.assert_close(errors.mean(), io["loss"], atol=1e-5, rtol=0)
    assert original.imitated == (1, 7)  # the action before the present one, and those from it on
    inputs = observed(io) | {"raw_actions": io["actions"], "noise": io["noise"],
                             "time": (io["time"] + 0.5) / 20}  # fmt: skip
    torch.testing.assert_close(original.imitation_errors(inputs), errors)


def test_statistics_may_be_among_the_weights(
    tmp_path: Path, original: DiffusionPolicy, io: dict[str, Tensor]
) -> None:
    path = as_before_processors(copied("diffusion", tmp_path))
    policy = published("diffusion", path, **GIVEN)
    assert torch.equal(
        policy.sample(observed(io), None).actions, original.sample(observed(io), None).actions
    )


def test_one_encoder_of_all_views_and_frozen_norms_are_known(tmp_path: Path) -> None:
    path = copied("diffusion", tmp_path)
    settings = json.loads((path / "config.json").read_text())
    changed = {"use_separate_rgb_encoder_per_camera": False, "use_group_norm": False}
    (path / "config.json").write_text(json.dumps(settings | changed))
    tensors: dict[str, Tensor] = {}
    for stored, tensor in load_file(path / "model.safetensors").items():
        if ".rgb_encoder.1." in stored:
            continue
        name = stored.replace(".rgb_encoder.0.", ".rgb_encoder.")
        tensors[name] = tensor
        if ".backbone." in name and name.endswith(".bias"):
            part = name.removesuffix(".bias")
            tensors |= {f"{part}.running_mean": tensor.clone(),
                        f"{part}.running_var": torch.ones_like(tensor),
                        f"{part}.num_batches_tracked": torch.tensor(7)}  # fmt: skip
    save_file(tensors, path / "model.safetensors")
    policy = published("diffusion", path, **GIVEN)
    assert policy.network.size.encoders == 1
    first = policy.network.rgb_encoder[0].backbone.bn1
    assert torch.equal(first.running_mean, first.bias)
    inputs = observed(load_file(path / "io.safetensors"))
    assert policy.sample(inputs, None).actions.isfinite().all()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"beta_schedule": "sigmoid"}, "beta_schedule: sigmoid .* squaredcos_cap_v2"),
        ({"prediction_type": "v_prediction"}, "prediction_type: v_prediction"),
        ({"num_train_timesteps": 3}, "4 steps are more than the 3 times .* nearest: 3"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    path = copied("diffusion", tmp_path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(ConfigError, match=match):
        published("diffusion", path, **GIVEN)


def _successive(spec: Any) -> Any:
    """The spec of an environment that shows two successive observations."""
    return replace(
        spec,
        observation_shapes={f"{key}{age}": shape for age in ("", "@1")
                            for key, shape in spec.observation_shapes.items()},
        observation_dtypes={f"{key}{age}": kind for age in ("", "@1")
                            for key, kind in spec.observation_dtypes.items()},
    )  # fmt: skip


def test_what_was_seen_before_is_read_as_the_original_does(io: dict[str, Tensor]) -> None:
    given = {**PLAIN, "method": "ddim", "repeat_observation": False}
    policy = published("diffusion", PARITY / "diffusion", _successive(PUBLISHED), **given)
    before = {
        f"{name}@1": each
        for name, each in observed(
            {name: io[f"{name}@1"] for name in ("states", "front", "wrist")}
        ).items()
    }
    found = policy.sample(observed(io) | before, {"start": io["start"]}).actions
    assert (io["acted_after_another"] - io["acted_ddim"]).abs().max() > 0.01
    torch.testing.assert_close(found, io["acted_after_another"], atol=1e-5, rtol=0)


def test_a_small_one_reads_what_the_environment_shows() -> None:
    config = REGISTRY.load("diffusion")(preset="tiny", num_action_chunks=CHUNK, cameras=BOTH)
    policy = config.build(_successive(SPEC), value_dim=1, seed=0)
    now = seen()
    inputs = now | {f"{name}@1": each for name, each in now.items()}
    other = inputs | {"states@1": -now["states"]}
    noise = drawn(policy)
    acted = policy.sample(inputs, noise)
    assert policy.network.size.history == 2
    assert not torch.equal(policy.sample(other, noise).actions, acted.actions)
    again = policy.evaluate_actions({**inputs, **acted.forward_inputs})
    torch.testing.assert_close(again.log_probs, acted.log_probs)


def test_what_was_seen_before_is_repeated_only_if_asked_for() -> None:
    match = r"2 successive .* shows 1; nearest: env.train.observation_steps: 2; or repeat"
    with pytest.raises(ConfigError, match=match):
        published("diffusion", PARITY / "diffusion", **{**GIVEN, "repeat_observation": False})
    with pytest.raises(ConfigError, match=r"8 actions .* gives 7 at once; nearest: 7"):
        published("diffusion", PARITY / "diffusion", **{**GIVEN, "num_action_chunks": 8})


def test_illegal_sections_name_the_nearest_legal_value() -> None:
    section = REGISTRY.load("diffusion")
    with pytest.raises(ValidationError, match="nearest: 2"):
        section(preset="tiny", denoising_steps=1, min_std=0)
    for given in ({"min_std": 0.2}, {"random_steps": "all"}):
        with pytest.raises(ValidationError, match="has no effect without method: ddpm"):
            section(preset="tiny", method="ddim", **given)
    with pytest.raises(ValidationError, match="the directory says which it is; leave it out"):
        section(path="published", prediction="sample")
    # As the configuration of a run has them, all keys written out.
    section(path="published", prediction="epsilon")
    section(preset="tiny", method="ddim", min_std=0.1, random_steps="one")
    with pytest.raises(ConfigError, match=r"9 is no multiple of 2.* nearest: 10"):
        tiny("diffusion", horizon=9)


def test_every_published_tensor_has_its_place() -> None:
    """Names and shapes of the published size, as lerobot writes them."""
    with torch.device("meta"):
        network = DiffusionNetwork(DiffusionSize(history=2))
    layout, stored = DiffusionPolicy.layouts[0], dict[str, tuple[int, ...]]()
    for name, each in network.state_dict().items():
        theirs = f"diffusion.{name}".replace("backbone.conv1", "backbone.0")
        theirs = theirs.replace("backbone.bn1", "backbone.1")
        for stage in range(1, 5):
            theirs = theirs.replace(f"backbone.layer{stage}", f"backbone.{3 + stage}")
        stored[theirs] = tuple(each.shape)
        assert layout.ours(theirs) == name
    assert checksum(stored) == NAMES


def test_the_schedule_ends_in_noise_and_its_ends_are_consistent() -> None:
    kept = kept_shares("squaredcos_cap_v2", 100)
    assert kept[0] > 0.99
    assert kept[-1] < 1e-5
    expected = math.cos((0.5 + 0.008) / 1.008 * math.pi / 2) ** 2
    assert math.isclose(float(kept[49]), expected / math.cos(0.008 / 1.008 * math.pi / 2) ** 2,
                        rel_tol=1e-4)  # fmt: skip
    rates = 1 - kept_shares("linear", 2, first=0.1, last=0.2)
    torch.testing.assert_close(rates, torch.tensor([0.1, 1 - 0.9 * 0.8]))
    actions, noise, share = torch.randn(3, 5, 2), torch.randn(3, 5, 2), kept[[3, 40, 80]]
    x = mixed(actions=actions, noise=noise, kept=share)
    for prediction, given in (("epsilon", noise), ("sample", actions)):
        found = both_ends(prediction, predicted=given, x=x, kept=share)  # type: ignore[arg-type]
        torch.testing.assert_close(found[0], actions, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[1], noise, atol=1e-4, rtol=1e-4)


def test_a_random_step_keeps_the_marginal() -> None:
    """x with noise of variance 1 − ᾱ becomes one of variance 1 − ᾱ', with mean √ᾱ' a."""
    kept, after = torch.tensor([0.3]), torch.tensor([0.6])
    actions = torch.full((1, 200_000, 1), 0.7)
    generator = torch.Generator().manual_seed(0)
    noise, more = (torch.randn(actions.shape, generator=generator) for _ in range(2))
    x = mixed(actions=actions, noise=noise, kept=kept)
    mean, std = posterior(actions=actions, x=x, kept=kept, after=after)
    found = mean + std * more
    assert math.isclose(float(found.mean()), 0.7 * 0.6**0.5, abs_tol=0.005)
    assert math.isclose(float(found.var()), 0.4, abs_tol=0.005)
    ended = posterior(actions=actions, x=x, kept=kept, after=torch.ones(1))
    torch.testing.assert_close(ended[0], actions)
    assert ended[1].max() == 0


def test_chains_are_replayed_to_the_bit(policy: DiffusionPolicy) -> None:
    sample = policy.sample(seen(), drawn(policy))
    found = policy.evaluate_actions(seen() | sample.forward_inputs)
    assert sample.values is not None
    assert torch.equal(found.log_probs, sample.log_probs)
    assert torch.equal(found.values, sample.values)
    chain = sample.forward_inputs["chain"]
    with torch.no_grad():
        (condition,) = policy._read(seen())
        if policy._config.all_random:
            expected = Normal(0.0, 1.0).log_prob(chain[:, 0])
            for step in range(STEPS):
                mean, std = policy._move(condition, chain[:, step], step)
                expected = expected + Normal(mean, std).log_prob(chain[:, step + 1])
        else:
            mean, std = policy._move(condition, chain[:, 0], sample.forward_inputs["step_index"])
            expected = Normal(mean, std).log_prob(chain[:, 1])
    assert std.min() >= 0.1 - 1e-6
    torch.testing.assert_close(found.log_probs, expected[:, :CHUNK], atol=2e-5, rtol=1e-5)


def test_imitation_is_the_error_of_the_noise_and_reaches_all_parts(policy: DiffusionPolicy) -> None:
    noise = draw_noise(policy.imitation_noise, (ROWS,), torch.Generator().manual_seed(1))
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    raw = low + 0.3 * torch.rand(ROWS, CHUNK, 3)
    errors = policy.imitation_errors(seen() | {"raw_actions": raw} | noise)
    share = policy.kept[(noise["time"] * 100).long()][:, None, None]
    actions = 2 * (raw - low) / (high - low) - 1
    x = share.sqrt() * actions + (1 - share).sqrt() * noise["noise"]
    with torch.no_grad():
        predicted = policy.network.denoise(*policy._read(seen()), x, (noise["time"] * 100).long())
    torch.testing.assert_close(errors, (predicted - noise["noise"]).square())
    errors.mean().backward()
    assert all(
        p.grad is not None for n, p in policy.named_parameters() if not n.startswith("value_head")
    )
    policy.zero_grad()


def test_windows_are_cut_where_the_noise_says(original: DiffusionPolicy) -> None:
    assert "corner" in original.imitation_noise
    picture = torch.arange(32 * 48.0).view(1, 1, 32, 48).expand(2, 3, 32, 48)
    middle = original.network._cut(picture, None)
    corners = original.network._cut(picture, torch.tensor([[0.0, 0.0], [0.999, 0.999]]))
    assert middle.shape == corners.shape == (2, 3, 28, 40)
    assert torch.equal(middle, picture[:, :, 2:30, 4:44])
    assert torch.equal(corners[0], picture[0, :, :28, :40])
    assert torch.equal(corners[1], picture[1, :, 4:, 8:])


@pytest.mark.parametrize(("min_std", "last"), [(0.0, STEPS - 2), (0.1, STEPS - 1)])
def test_a_step_without_a_deviation_is_never_the_random_one(min_std: float, last: int) -> None:
    policy = tiny("diffusion", denoising_steps=STEPS, random_steps="one", min_std=min_std)
    noise = draw_noise(policy.noise, (ROWS,), torch.Generator().manual_seed(0))
    noise["step_index"] = torch.linspace(0, 0.999, ROWS)
    which = policy.sample(seen(ROWS), noise).forward_inputs["step_index"]
    assert (which.min(), which.max()) == (0, last)
