"""What a model's actions are in the units of an environment."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.config import REGISTRY
from rlinf.models.policy import draw_noise
from tests.models.vla.test_instructions import SHOWN


def test_what_is_kept_for_training_is_what_the_model_gave():
    """Where actions are deltas, and have no units, the environment is given other numbers."""
    free = replace(SHOWN, action_low=(-torch.inf,) * 2, action_high=(torch.inf,) * 2)
    rows = {
        "main_images": torch.zeros(1, 32, 32, 3, dtype=torch.uint8),
        "states": torch.full((1, 3), 10.0),
    }
    found = []
    for deltas in ((), (0, 1)):
        config = REGISTRY.load("pi05")(
            preset="tiny",
            num_action_chunks=2,
            method="flow_sde",
            denoising_steps=2,
            conventions={"delta_dimensions": deltas},
        )
        policy = config.build(free, seed=0)
        noise = draw_noise(policy.noise, (1,), torch.Generator().manual_seed(1))
        found.append(policy.sample(rows, noise))
    plain, moved = found
    assert torch.equal(plain.forward_inputs["denoised"], moved.forward_inputs["denoised"])
    torch.testing.assert_close(moved.actions, plain.actions + 10.0)


@pytest.mark.parametrize("kind", ["openvla", "openvla_oft", "qwen_vl"])
@pytest.mark.parametrize("frozen", [False, True])
def test_adapters_leave_a_frozen_vision_part_as_it_is(kind, frozen):
    pytest.importorskip("transformers")
    from rlinf.models.adapters import adapt_policy
    from rlinf.models.language_config import AdapterConfig

    config = REGISTRY.load(kind)(preset="tiny", num_action_chunks=1, freeze_vision=frozen)
    policy = config.build(SHOWN, value_dim=0, seed=0)
    adapt_policy(policy, AdapterConfig(rank=2), seed=0)
    trained = [each for each in policy.vision.parameters() if each.requires_grad]
    assert bool(trained) != frozen
    assert any(each.requires_grad for each in policy.parameters())


@pytest.mark.parametrize("kind", ["openvla", "qwen_vl"])
def test_adapters_that_a_former_version_trained_in_frozen_vision_are_named(kind):
    pytest.importorskip("transformers")
    from rlinf.models.adapters import adapt_policy
    from rlinf.models.language_config import AdapterConfig
    from rlinf.models.policy_weights import load_travelling, travelling

    def adapted(frozen):
        config = REGISTRY.load(kind)(preset="tiny", num_action_chunks=1, freeze_vision=frozen)
        policy = config.build(SHOWN, value_dim=0, seed=0)
        adapt_policy(policy, AdapterConfig(rank=2), seed=0)
        return policy

    with pytest.raises(CheckpointError, match=r"nearest: model\.freeze_vision=false"):
        load_travelling(adapted(True), travelling(adapted(False)))
    load_travelling(adapted(False), travelling(adapted(False)))
    with pytest.raises(CheckpointError, match="missing"):
        load_travelling(adapted(False), travelling(adapted(True)))


@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla", "gr00t", "wall_oss"])
def test_one_random_step_stands_between_deterministic_ones(kind):
    """What a step is scored from and by lies on the way from the start to what is executed."""
    steps = 4
    config = REGISTRY.load(kind)(
        preset="tiny", num_action_chunks=2, method="flow_sde", denoising_steps=steps
    )
    policy = config.build(SHOWN, value_dim=0, seed=0)
    count, generator = 8, torch.Generator().manual_seed(3)
    rows = {
        "main_images": torch.randint(0, 256, (count, 32, 32, 3), generator=generator).byte(),
        "states": torch.randn(count, 3, generator=generator),
    }
    noise = draw_noise(policy.noise, (count,), generator)
    given = policy.sample(rows, noise).forward_inputs
    which, (before, after) = given["step_index"], given["chain"].unbind(1)
    assert len(which.unique()) > 1
    with torch.no_grad():
        read, reached, x = policy._read(rows), noise["start"], after
        for step in range(steps):
            plain = policy._plain_step(policy._predicted(*read, reached, step), reached, step)
            reached = torch.where((step < which)[:, None, None], plain, reached)
            plain = policy._plain_step(policy._predicted(*read, x, step), x, step)
            x = torch.where((step > which)[:, None, None], plain, x)
    torch.testing.assert_close(before, reached, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(given["denoised"], x, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(after, given["denoised"], atol=1e-3)


def test_the_middle_that_is_looked_at_has_nine_tenths_of_the_area():
    from rlinf.models.vla.openvla.policy import TINY_PIXELS, _Pixels

    values = TINY_PIXELS
    ramp = torch.linspace(0, 255, values.size).byte().expand(1, values.size, values.size)
    pictures = ramp.unsqueeze(-1).expand(-1, -1, -1, 3)
    widths = []
    for crop in (False, True):
        seen = _Pixels(values, crop=crop)(pictures)[0, 0]
        widths.append((seen[0, -1] - seen[0, 0]).item())
    assert widths[1] / widths[0] == pytest.approx(0.9**0.5, abs=0.01)


def test_weights_say_with_how_many_actions_they_denoise(tmp_path):
    """No shape tells; fewer are executed by `num_action_chunks` beside the same horizon."""
    kind, file = REGISTRY.load("pi05"), tmp_path / "policy.safetensors"

    def section(**given):
        return kind(preset="tiny", num_action_chunks=given.pop("chunk", 8), **given)

    policy = section().build(SHOWN, value_dim=0, seed=0)
    save_file(policy.state_dict(), file, metadata=section().header())
    section(chunk=4, horizon=8, weights=file).check()
    for given in ({"chunk": 4}, {"chunk": 16}, {"horizon": 12}):
        with pytest.raises(ConfigError, match=r"was trained with model\.horizon: 8, here \d+"):
            section(**given, weights=file).check()
