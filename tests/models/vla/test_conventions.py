"""What a model's actions are in the units of an environment."""

from dataclasses import replace

import pytest
import torch

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
