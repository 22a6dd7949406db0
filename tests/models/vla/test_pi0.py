"""π₀ and π₀.₅ against the original code; see make_parity.py."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlinf.models.vla.pi0.network import PI0Network
from tests.models.vla.test_loading import PARITY, load


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def case(request: pytest.FixtureRequest) -> tuple[PI0Network, dict[str, Tensor]]:
    directory = PARITY / request.param
    return load(request.param, directory), load_file(directory / "io.safetensors")


def sampled(model: PI0Network, io: dict[str, Tensor]) -> Tensor:
    pixels = torch.stack([io["image_0"], io["image_1"]], dim=1)
    there = torch.stack([io["image_mask_0"], io["image_mask_1"]], dim=1)
    x = io["noise"]
    with torch.inference_mode():
        prefix = model.prefix(pixels, there, io["tokens"], io["token_mask"])
        for step in range(4):
            time = torch.full((len(x),), 1 - step / 4)
            x = x - model.denoise(prefix, x, time, io.get("state"))[0] / 4
    return x


def test_actions_are_those_of_the_original(case: tuple[PI0Network, dict[str, Tensor]]) -> None:
    model, io = case
    assert io["actions"].abs().mean() > 0.5
    torch.testing.assert_close(sampled(model, io), io["actions"], atol=1e-5, rtol=0)


def test_what_is_masked_is_not_seen(case: tuple[PI0Network, dict[str, Tensor]]) -> None:
    model, io = case
    io = io | {"image_mask_1": torch.tensor([True, False]), "token_mask": io["tokens"] > 20}
    changed = io | {
        "image_1": torch.cat([io["image_1"][:1], -io["image_1"][1:]]),
        "tokens": torch.where(io["token_mask"], io["tokens"], 3),
    }
    torch.testing.assert_close(sampled(model, changed), sampled(model, io), atol=1e-6, rtol=0)
    seen = io | {"image_0": -io["image_0"]}
    assert (sampled(model, seen) - sampled(model, io)).abs().max() > 1e-3


def test_the_state_token_of_pi0_sees_no_action(
    case: tuple[PI0Network, dict[str, Tensor]],
) -> None:
    model, io = case
    if "state" not in io:
        pytest.skip("π₀.₅ has no state token")
    hidden = []
    model.expert.register_forward_hook(lambda _, __, out: hidden.append(out[0][:, 0]))
    sampled(model, io)
    sampled(model, io | {"noise": io["noise"] + 1})
    torch.testing.assert_close(hidden[0], hidden[4], atol=1e-6, rtol=0)
    sampled(model, io | {"state": io["state"] + 1})
    assert (hidden[0] - hidden[8]).abs().max() > 1e-3
