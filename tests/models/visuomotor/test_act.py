"""ACT against the original code (see make_parity.py), and as a policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributions import Normal

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.supervised import Supervised
from rlinf.errors import ConfigError
from rlinf.models.adapters import adapt_policy
from rlinf.models.config import type_of_directory
from rlinf.models.language_config import AdapterConfig
from rlinf.models.policy import drawn_in_evaluation
from rlinf.models.policy_weights import travelling
from rlinf.models.visuomotor.act import ACTNetwork, ACTSize
from rlinf.models.visuomotor.act_policy import ACTPolicy
from tests.models.test_policies import env_spec

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

NAMES = "6934903113ede77fdc91d9cfae01734ab5ee67d81d176d8caa068f3923cecb75"
"""What `make_parity.py names` prints for the published size, of all but computed positions."""


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(PARITY / "act" / "io.safetensors")


@pytest.fixture(scope="module")
def original() -> ACTPolicy:
    assert type_of_directory(PARITY / "act") == "act"
    policy = published("act", PARITY / "act", num_action_chunks=8)
    assert isinstance(policy, ACTPolicy)
    return policy


@pytest.fixture(scope="module")
def policy() -> ACTPolicy:
    return tiny("act")


def errors_of(policy: ACTPolicy, io: dict[str, Tensor], kl_weight: float) -> Tensor:
    """Loss of the supervised trainer."""
    policy._config = policy._config.model_copy(update={"kl_weight": kl_weight})
    inputs = observed(io) | {"raw_actions": io["actions"], "latent": io["latent"]}
    mask = io["recorded"].float().unsqueeze(-1).expand_as(io["actions"]).flatten(1)
    return Supervised("model").errors(policy, Batch.of(inputs=inputs, mask=mask))


def test_actions_are_those_of_the_original(original: ACTPolicy, io: dict[str, Tensor]) -> None:
    found = original.sample(observed(io), None).actions
    assert io["acted"].abs().max() < 4  # the box cuts nothing
    assert io["acted"].std() > 0.1
    torch.testing.assert_close(found, io["acted"], atol=1e-5, rtol=0)


def test_losses_are_those_of_the_original(original: ACTPolicy, io: dict[str, Tensor]) -> None:
    errors, terms = errors_of(original, io, 0.0), io["recorded"].sum() * 3
    torch.testing.assert_close(errors.sum() / terms, io["l1_loss"], atol=1e-5, rtol=0)
    # The divergence is that of each row beside each of its terms.
    beside = errors_of(original, io, 10.0) - errors
    rows = beside.sum(1) / io["recorded"].sum(1) / 3 / 10
    torch.testing.assert_close(rows.mean(), io["kld_loss"], atol=1e-5, rtol=0)


def test_statistics_may_be_among_the_weights(
    tmp_path: Path, original: ACTPolicy, io: dict[str, Tensor]
) -> None:
    policy = published("act", as_before_processors(copied("act", tmp_path)), num_action_chunks=8)
    assert torch.equal(
        policy.sample(observed(io), None).actions, original.sample(observed(io), None).actions
    )


def test_pictures_are_in_the_units_that_the_model_was_trained_with(original: ACTPolicy) -> None:
    (file,) = (PARITY / "act").glob("policy_preprocessor_*.safetensors")
    known = load_file(file)
    for number, name in enumerate(("front", "wrist")):
        mean = known[f"observation.images.{name}.mean"]
        torch.testing.assert_close(original.picture_mean[number], mean)
    assert (original.picture_mean[0] != original.picture_mean[1]).any()


def test_every_published_tensor_has_its_place() -> None:
    """Names and shapes of the published size for ALOHA, as lerobot writes them."""
    with torch.device("meta"):
        network = ACTNetwork(ACTSize())
    layout, stored = ACTPolicy.layouts[0], dict[str, tuple[int, ...]]()
    for name, each in network.state_dict().items():
        theirs, count = f"model.{name}", 1
        for part in ("q_proj.", "k_proj.", "v_proj."):
            if part in theirs:
                theirs, count = theirs.replace(part, "in_proj_"), 3
        stored[theirs] = (count * each.shape[0], *each.shape[1:])
    parts = [part for name in stored for part in layout.parts(str(layout.ours(name)))]
    assert sorted(parts) == sorted(network.state_dict())
    assert sum(each.numel() for each in network.parameters()) == 51_613_582
    assert checksum(stored) == NAMES
    assert len(stored) == 233


MISSHAPEN = {
    "observation.state": {"type": "STATE", "shape": "x"},
    **{f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 32, 48]} for name in "ab"},
}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"n_obs_steps": 2}, "n_obs_steps: 2 .* a model with 1"),
        ({"feedforward_activation": "glu"}, "glu .* relu or gelu"),
        ({"replace_final_stride_with_dilation": True}, "replace_final_stride_with_dilation"),
        ({"normalization_mapping": {"STATE": "QUANTILE10"}}, r"mapping\.STATE: QUANTILE10"),
        ({"n_heads": 0}, "n_heads: 0 .* a model with 8 or 1 or 2"),
        ({"input_features": {}}, "sees no pictures"),
        ({"output_features": None}, "describes input_features"),
        ({"normalization_mapping": [1]}, r"normalization_mapping: \[1\] .* expected a mapping"),
        ({"normalization_mapping": {"STATE": []}}, r"normalization_mapping\.STATE: \[\]"),
        (
            {"input_features": MISSHAPEN},
            r"^model\.path: .* cannot be read as a model of the type act .*copy the mod",
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    path = copied("act", tmp_path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(ConfigError, match=match):
        published("act", path, num_action_chunks=8)


def test_another_environment_is_refused() -> None:
    def refused(match: str, spec: Any = PUBLISHED, **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            published("act", PARITY / "act", spec, **{"num_action_chunks": 8} | options)

    refused("trained on observation.images.front of 32 × 48, but main_images are of 48 × 64",
            SPEC)  # fmt: skip
    refused("sees 2 pictures .* gives 1", cameras=("main_images",))
    refused("reads states, use_states is False", use_states=False)
    refused("9 actions are to be executed, the model gives 8", num_action_chunks=9)
    shapes = {**PUBLISHED.observation_shapes, "states": (3,)}
    refused("4 state dimensions, the environment gives 3", env_spec(
        observation_shapes=shapes, observation_dtypes=PUBLISHED.observation_dtypes,
        action_low=(-4.0,) * 3, action_high=(4.0,) * 3))  # fmt: skip


def test_missing_and_left_over_weights_are_one_error(tmp_path: Path) -> None:
    path = copied("act", tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.encoder.layers.0.self_attn.in_proj_bias"]
    save_file(tensors | {"model.more": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"3 missing .*q_proj\.bias.*; 1 unknown .*model\.more"):
        published("act", path, num_action_chunks=8)


def test_log_probs_are_a_gaussian_around_the_chunk(policy: ACTPolicy) -> None:
    sample, middle = policy.sample(seen(), drawn(policy)), policy.sample(seen(), None)
    found = policy.evaluate_actions(seen() | sample.forward_inputs)
    assert torch.equal(found.log_probs, sample.log_probs)
    assert torch.equal(found.values, sample.values)
    around = Normal(middle.forward_inputs["sampled"], policy.log_std.exp())
    drawn_actions = sample.forward_inputs["sampled"]
    torch.testing.assert_close(found.log_probs, around.log_prob(drawn_actions))
    torch.testing.assert_close(found.entropy, around.entropy())
    found.log_probs.sum().backward()
    assert policy.log_std.grad is not None
    assert not any("vae" in n for n, p in policy.named_parameters() if p.grad is not None)
    policy.zero_grad()


def test_imitation_is_the_absolute_error_and_reaches_all_parts(policy: ACTPolicy) -> None:
    low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
    raw = low + 0.3 * torch.rand(ROWS, CHUNK, 3)
    latent = torch.randn(ROWS, policy.network.size.latent)
    errors = policy.imitation_errors(seen() | {"raw_actions": raw, "latent": latent})
    with torch.no_grad():  # at first the latent is standard normal
        found = policy.network.decode(*policy._read(seen(), latent))[:, :CHUNK]
    torch.testing.assert_close(errors, (found - (2 * (raw - low) / (high - low) - 1)).abs())
    errors.mean().backward()
    untouched = {n for n, p in policy.named_parameters() if p.grad is None}
    assert all(n.startswith(("value_head", "log_std")) for n in untouched)
    policy.zero_grad()


def test_the_latent_does_not_see_beyond_the_end_of_an_episode() -> None:
    policy = tiny("act", kl_weight=1.0, horizon=6)
    with torch.no_grad():
        policy.network.vae_encoder_latent_output_proj.weight.normal_()
    raw, recorded = torch.rand(ROWS, 6, 3), torch.ones(ROWS, 6, dtype=torch.bool)
    recorded[0, 2:] = False
    latent = torch.randn(ROWS, policy.network.size.latent)
    inputs = seen() | {"raw_actions": raw, "latent": latent, "recorded": recorded}
    before = policy.imitation_errors(inputs)
    raw[:, 2:] += 0.5
    moved = (policy.imitation_errors(inputs) - before)[:, :2].abs().amax((1, 2))
    assert moved[0] == 0
    assert moved[1:].min() > 1e-4


def test_a_chunk_is_mixed_with_what_was_decided_before(policy: ACTPolicy) -> None:
    actions = policy.sample(seen(), None).actions
    prefix = torch.full_like(actions, 0.05)
    weights = torch.tensor([1.0, 0.5, 0.25, 0.0]).expand(ROWS, -1)
    found = policy.sample_continuing(seen(), prefix, weights).actions
    expected = weights[..., None] * prefix + (1 - weights[..., None]) * actions
    torch.testing.assert_close(found, expected)


def test_adapters_reach_the_attention_and_travel_alone() -> None:
    policy, plain = tiny("act"), tiny("act")
    adapt_policy(policy, AdapterConfig(rank=2, target_modules=["q_proj", "v_proj"]), seed=0)
    sent = travelling(policy)
    assert {"log_std", "value_head.layers.0.weight"} <= sent.keys()
    assert "network.action_head.weight" not in sent
    names = {name for name in sent if name.endswith("lora_B")}
    assert {n.split(".")[-2] for n in names} == {"q_proj", "v_proj"}
    with torch.no_grad():
        for name in names:
            policy.get_parameter(name).normal_()
    change = policy.sample(seen(), None).actions - plain.sample(seen(), None).actions
    assert change.abs().max() > 1e-3


def test_tiny_is_small_and_needs_no_states() -> None:
    one, again, other = (tiny("act", seed=seed, use_states=False) for seed in (0, 0, 1))
    assert sum(each.numel() for each in one.parameters()) < 3e6
    inputs = {name: each for name, each in seen().items() if name in BOTH}
    found = [each.sample(inputs, None).actions for each in (one, again, other)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_an_evaluation_has_nothing_to_draw() -> None:
    with pytest.raises(ConfigError, match=r"ACTPolicy has nothing to draw.*legal: true"):
        drawn_in_evaluation(tiny("act"))
    assert drawn_in_evaluation(tiny("diffusion")).keys() == {"start"}
