"""What the values of policies that denoise actions are read from."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from rlinf.models.policy import draw_noise
from tests.models.vla.support import built
from tests.models.vla.test_pi0_policy import ROWS, seen

DEFAULTS = {
    "pi0": "expert",
    "pi05": "mean",
    "smolvla": "expert",
    "gr00t": "mean and state",
    "wall_oss": "expert",
}


@pytest.mark.parametrize("which", ["expert", "mean", "first", "last", None])
@pytest.mark.parametrize("kind", DEFAULTS)
def test_values_are_read_where_the_recipe_says(kind: str, which: str | None) -> None:
    if (kind, which) == ("wall_oss", "first"):  # it sees none of what follows it
        with pytest.raises(ValidationError, match="'expert', 'mean' or 'last'"):
            built(kind, value_from=which)
        return
    policy = built(kind, value_from=which)
    prefix, states = policy._read(seen())
    found = policy._features(prefix, states)
    said = which or DEFAULTS[kind]
    if said == "expert":
        size = policy.network.size
        blank = torch.zeros(ROWS, size.horizon, size.action_dim)
        wanted = policy._denoise(prefix, states, blank, policy._time(0, blank))[1].mean(1)
    else:
        there = [hidden[mask] for hidden, mask in zip(prefix.hidden, prefix.mask, strict=True)]
        wanted = torch.stack([
            {"first": row[0], "last": row[-1]}.get(said, row.mean(0)) for row in there
        ])  # fmt: skip
    if said == "mean and state":
        found = found[:, : wanted.shape[1]]
    torch.testing.assert_close(found, wanted)
    for parameter in policy.value_head.parameters():  # its last layer begins at 0
        torch.nn.init.normal_(parameter, std=0.2)
    values = policy.value(seen())
    assert values.shape == (ROWS, 1)
    assert values.std() > 0
    noise = draw_noise(policy.noise, (ROWS,), torch.Generator().manual_seed(5))
    torch.testing.assert_close(policy.sample(seen(), noise).values, values, atol=1e-6, rtol=1e-5)
