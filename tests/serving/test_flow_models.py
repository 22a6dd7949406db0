"""π₀ behind a server: its answers are those of this process, and it continues chunks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.envs.base import INSTRUCTION_KEY, INSTRUCTION_SHAPE
from rlinf.models.config import REGISTRY
from rlinf.models.vla.pi0.policy import PI0Policy
from rlinf.serving.chunks import RealTimeChunks
from rlinf.serving.client import ServerError

from .support import SPEC, Running, observation, serving

STEPS = 5


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def policy(request: pytest.FixtureRequest) -> PI0Policy:
    config = REGISTRY.load(request.param)(
        preset="tiny", num_action_chunks=4, horizon=6, denoising_steps=STEPS, value_head=(8,)
    )
    found = config.build(SPEC, value_dim=1, seed=1).eval()
    assert isinstance(found, PI0Policy)
    # Fresh biases are 0, so that the first norm of π₀.₅ has no useful slope where denoising starts.
    bias = found.network.action_in_proj.bias
    torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(0))
    return found


@pytest.fixture(scope="module")
def running(policy: PI0Policy) -> Iterator[Running]:
    with serving(policy, spec=SPEC) as found:
        yield found


def inputs(seed: int) -> dict[str, torch.Tensor]:
    given = observation(seed)
    given["task_ids"] = np.int64(seed % 3)
    del given["prompt"]
    return {name: torch.from_numpy(np.asarray(each)[None]) for name, each in given.items()}


def test_answers_are_those_of_this_process(policy: PI0Policy, running: Running) -> None:
    with running.connect() as client:
        assert client.metadata["prefix"]
        for seed in range(3):
            answer = client.infer(observation(seed))["actions"]
            own = policy.sample(inputs(seed), None).actions[0].numpy()
            np.testing.assert_array_equal(answer, own)


@pytest.mark.parametrize(
    ("name", "options", "states"),
    [
        ("pi0", {}, True),
        ("pi05", {"state_in_prompt": False}, False),
        ("pi05", {"state_in_prompt": False, "conventions": {"delta_dimensions": [0]}}, True),
        ("openvla_oft", {}, False),
        ("openvla_oft", {"proprioception": True}, True),
        ("act", {"use_states": False}, False),
    ],
)
def test_no_more_is_asked_for_than_is_read(name: str, options: Any, states: bool) -> None:
    picture = (32, 32, 3)
    shapes = {"main_images": picture, "wrist_images": picture, "depth.front": (32, 32)}
    types = {"wrist_images": "uint8", "depth.front": "float32"}
    spec = replace(SPEC, observation_shapes={**SPEC.observation_shapes, **shapes},
                   observation_dtypes={**SPEC.observation_dtypes, **types})  # fmt: skip
    config = REGISTRY.load(name)(preset="tiny", num_action_chunks=4, **options)
    policy = config.build(spec, value_dim=1, seed=1).eval()
    seen = {
        key: (torch.rand(1, *shape) * 3).to(getattr(torch, spec.observation_dtypes[key]))
        for key, shape in spec.observation_shapes.items()
    }
    asked = policy.acts_on(seen)
    assert {*asked} == {"main_images", "task_ids", *(("states",) if states else ())}
    alone = policy.sample({key: seen[key] for key in asked}, None).actions
    assert torch.equal(alone, policy.sample(seen, None).actions)


def test_what_is_no_number_is_refused_and_the_connection_stays(running: Running) -> None:
    with running.connect() as client:
        for broken in (np.nan, np.inf):
            given = observation(0)
            given["states"][2] = broken
            with pytest.raises(ServerError, match=r"no finite number, first at \[2\]"):
                client.infer(given)
        prefix = np.full((1, SPEC.action_dim), np.nan, np.float32)
        with pytest.raises(ServerError, match="`prefix` holds what is no finite number"):
            client.infer(observation(0) | {"prefix": prefix, "prefix_weights": np.float32([1.0])})
        assert np.isfinite(client.infer(observation(0))["actions"]).all()


@pytest.mark.parametrize("name", ["pi0", "pi05", "gr00t"])
def test_a_prompt_that_is_too_long_is_refused_and_no_other(name: str) -> None:
    shapes = {key: shape for key, shape in SPEC.observation_shapes.items() if key != "task_ids"}
    spec = replace(
        SPEC,
        task_descriptions=(),
        observation_shapes={**shapes, INSTRUCTION_KEY: INSTRUCTION_SHAPE},
        observation_dtypes={**SPEC.observation_dtypes, INSTRUCTION_KEY: "uint8"},
    )
    config = REGISTRY.load(name)(
        preset="tiny", num_action_chunks=4, horizon=4, denoising_steps=1, max_prompt_tokens=60
    )
    policy = config.build(spec, value_dim=0, seed=1).eval()
    prompts = ["go left", "go " * 60, "go right"]
    with (
        serving(policy, spec=spec, wait=0.3) as running,
        ThreadPoolExecutor(3) as pool,
        running.connect() as first,
        running.connect() as second,
        running.connect() as third,
    ):
        clients = (first, second, third)
        good, bad, other = (pool.submit(client.infer, observation(0) | {"prompt": prompt})
                            for client, prompt in zip(clients, prompts, strict=True))  # fmt: skip
        assert good.result(30)["actions"].shape == other.result(30)["actions"].shape == (4, 3)
        with pytest.raises(ServerError, match=r"`prompt` makes \d+ tokens, .* legal: 60 or"):
            bad.result(30)
    assert str(running.server.latencies).startswith("2 answered, 1 refused, 0 failed")


def test_what_is_committed_is_continued(policy: PI0Policy, running: Running) -> None:
    prefix = np.full((3, SPEC.action_dim), 0.3, np.float32)
    with running.connect() as client:
        free = client.infer(observation(0))["actions"]

        def guided(*weights: float) -> np.ndarray:
            asked = {"prefix": prefix, "prefix_weights": np.float32(weights)}
            return client.infer(observation(0) | asked)["actions"]

        near, none = guided(1.0, 1.0, 0.0), guided(0.0, 0.0, 0.0)
    before, after = (np.abs(each[:2] - prefix[:2]) for each in (free, near))
    assert after.mean() < 0.3 * before.mean(), (after, before)
    np.testing.assert_array_equal(none, free)


def test_guidance_is_that_of_the_denoised_actions(policy: PI0Policy) -> None:
    prefix, weights = torch.full((1, 4, 3), 0.2), torch.ones(1, 4)
    found = policy.sample_continuing(inputs(1), prefix, weights).actions
    assert not found.requires_grad
    assert not found.is_inference()
    assert not any(parameter.grad is not None for parameter in policy.parameters())
    free = policy.sample(inputs(1), None).actions
    assert (found - prefix).abs().mean() < 0.3 * (free - prefix).abs().mean()


def test_chunks_in_real_time(running: Running) -> None:
    with running.connect() as client, RealTimeChunks(client, execute=2) as chunks:
        for step in range(6):
            assert chunks.act(observation(step)).shape == (SPEC.action_dim,)
